"""Operations that treat rows alike, that sum over rows, and that are linear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from nbdist.jaxpr.batch_rows import (
    is_added_to_zeros,
    is_by_row,
    is_linear,
    is_sum_over_rows,
    with_fewer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Dims = tuple[int, ...]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def equation(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return the equation of a primitive in the program of a function."""

    def find(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == name:
                return eqn
            for inner in eqn.params.values():
                if hasattr(inner, "jaxpr") and (found := find(inner.jaxpr)) is not None:
                    return found
        return None

    found = find(jax.make_jaxpr(function)(*args).jaxpr)
    assert found is not None, f"there is no {name}"
    return found


def rows_of(eqn: Any, ins: tuple[Dims, ...], *outs: Dims) -> dict[Any, Dims]:
    """Return the dimensions that are rows of the inputs and results of an equation."""
    every = [*zip(eqn.invars, ins, strict=False), *zip(eqn.outvars, outs, strict=False)]
    return {var: dims for var, dims in every if dims and not isinstance(var, Literal)}


def conv(x: Any, kernel: Any, **options: Any) -> Any:
    numbers = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, **options)


MATRIX = (floats(4, 6),)
TWO = (floats(4, 4), floats(4, 4))
STACKS = (floats(4, 3, 6), floats(4, 6, 5))
PAIRS = (floats(4, 4, 3, 6), floats(4, 4, 6, 5))
IMAGES = (floats(4, 8, 8, 4), floats(3, 3, 4, 4))
LOOK_UP = (floats(8, 6), integers(4))
ALONG = (floats(4, 6), integers(4, 2))
UPDATE = (floats(4, 6),)


FIRST = ((0,), (0,)), ((), ())
"""Dimension numbers of a product that sums over the first dimension of both operands."""


def products(left: Any, right: Any) -> Any:
    return jnp.einsum("abij,abjk->abik", left, right)


@pytest.mark.parametrize(
    ("name", "function", "args", "ins", "out", "expected"),
    [
        ("add", jnp.add, TWO, ((0,), (0,)), (0,), True),
        ("add", jnp.add, TWO, ((0,), ()), (0,), True),
        ("add", jnp.add, TWO, ((0,), (1,)), (0,), False),
        ("add", jnp.add, TWO, ((0,), (0,)), (1,), False),
        ("reduce_sum", lambda x: x.sum(1), MATRIX, ((0,),), (0,), True),
        ("reduce_sum", lambda x: x.sum(0), MATRIX, ((0,),), (), False),
        ("reduce_max", lambda x: x.max((0, 1)), MATRIX, ((0,),), (), False),
        ("argmax", lambda x: x.argmax(1), MATRIX, ((0,),), (0,), True),
        ("argmax", lambda x: x.argmax(0), MATRIX, ((0,),), (), False),
        ("cumsum", lambda x: jnp.cumsum(x, 1), MATRIX, ((0,),), (0,), True),
        ("cumsum", lambda x: jnp.cumsum(x, 0), MATRIX, ((0,),), (0,), False),
        ("sort", lambda x: jnp.sort(x, 0), MATRIX, ((0,),), (0,), False),
        ("rev", lambda x: jnp.flip(x, 0), MATRIX, ((0,),), (0,), False),
        ("rev", lambda x: jnp.flip(x, 1), MATRIX, ((0,),), (0,), True),
        ("dot_general", jnp.matmul, (floats(4, 6), floats(6, 5)), ((0,), ()), (0,), True),
        ("dot_general", jnp.matmul, (floats(4, 6), floats(6, 5)), ((1,), ()), (), False),
        ("dot_general", jnp.matmul, (floats(4, 6), floats(6, 5)), ((), (0,)), (), False),
        ("dot_general", jnp.matmul, (floats(4, 6), floats(6, 5)), ((0,), (1,)), (0, 1), False),
        ("dot_general", jnp.matmul, STACKS, ((0,), (0,)), (0,), True),
        ("dot_general", products, PAIRS, ((1,), (1,)), (1,), True),
        ("dot_general", products, PAIRS, ((0,), (1,)), (0, 1), False),
        ("conv_general_dilated", conv, IMAGES, ((0,), ()), (0,), True),
        ("conv_general_dilated", conv, IMAGES, ((3,), ()), (), False),
        ("conv_general_dilated", conv, IMAGES, ((0,), (3,)), (0, 3), False),
        (
            "conv_general_dilated",
            lambda x, k: conv(x, k, batch_group_count=2),
            IMAGES,
            ((0,), ()),
            (0,),
            False,
        ),
        ("slice", lambda x: x[:, :2], MATRIX, ((0,),), (0,), True),
        ("slice", lambda x: x[:2], MATRIX, ((0,),), (0,), False),
        ("slice", lambda x: x[:2], MATRIX, ((0,),), (), False),
        ("pad", lambda x: jnp.pad(x, ((0, 0), (1, 1))), MATRIX, ((0,), ()), (0,), True),
        ("pad", lambda x: jnp.pad(x, ((0, 1), (0, 0))), MATRIX, ((0,), ()), (0,), False),
        ("concatenate", lambda x, y: jnp.concatenate([x, y], 1), TWO, ((0,), (0,)), (0,), True),
        ("concatenate", lambda x, y: jnp.concatenate([x, y], 0), TWO, ((0,), ()), (0,), False),
        (
            "reduce_window_max",
            lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), "VALID"),
            MATRIX,
            ((0,), ()),
            (0,),
            True,
        ),
        (
            "reduce_window_max",
            lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), "VALID"),
            MATRIX,
            ((1,), ()),
            (1,),
            False,
        ),
        ("gather", lambda t, i: t[i], LOOK_UP, ((), (0,)), (0,), True),
        ("gather", lambda t, i: t[i], LOOK_UP, ((0,), ()), (), False),
        ("gather", lambda t, i: t[:, i], (floats(4, 6), integers(3)), ((0,), ()), (0,), True),
        ("gather", lambda t, i: t[i], LOOK_UP, ((), (1,)), (), False),
        (
            "gather",
            lambda x, at: jnp.take_along_axis(x, at, 1),
            ALONG,
            ((0,), (0,)),
            (0,),
            True,
        ),
        (
            "gather",
            lambda x, at: jnp.take_along_axis(x, at, 1),
            ALONG,
            ((1,), (0,)),
            (0,),
            False,
        ),
        ("scatter", lambda x: x.at[:, 0].set(1.0), UPDATE, ((0,), (), ()), (0,), True),
        ("scatter", lambda x: x.at[0].set(1.0), UPDATE, ((0,), (), ()), (0,), False),
        ("top_k", lambda x: lax.top_k(x, 2), MATRIX, ((0,),), (0,), True),
        ("top_k", lambda x: lax.top_k(x, 2), MATRIX, ((1,),), (), False),
        ("reshape", lambda x: x.reshape(24), MATRIX, ((0,),), (0,), True),
        ("reshape", lambda x: x.reshape(24), MATRIX, ((0,),), (), False),
        ("transpose", lambda x: x.T, MATRIX, ((0,),), (1,), True),
        ("fft", jnp.fft.fft, MATRIX, ((0,),), (0,), False),
    ],
)
def test_rows_are_treated_alike(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ins: tuple[Dims, ...],
    out: Dims,
    expected: bool,
) -> None:
    eqn = equation(name, function, *args)
    assert is_by_row(eqn, rows_of(eqn, ins, out)) is expected


def scatter_by_row(x: Any, at: Any, new: Any) -> Any:
    return jax.vmap(lambda x, at, new: x.at[at].set(new))(x, at, new)


@pytest.mark.parametrize(
    ("ins", "expected"),
    [
        (((0,), (0,), (0,)), True),
        (((0,), (0,), ()), False),
        (((), (0,), (0,)), False),
        (((1,), (0,), (0,)), False),
    ],
)
def test_updates_go_to_the_same_rows(ins: tuple[Dims, ...], expected: bool) -> None:
    eqn = equation("scatter", scatter_by_row, floats(4, 6), integers(4), floats(4))
    assert is_by_row(eqn, rows_of(eqn, ins, (0,))) is expected


def kernel_gradient(x: Any, kernel: Any) -> Any:
    return jax.grad(lambda kernel: (conv(x, kernel) ** 2).sum())(kernel)


@pytest.mark.parametrize(
    ("name", "function", "args", "ins", "expected"),
    [
        ("reduce_sum", lambda x: x.sum(0), MATRIX, ((0,),), True),
        ("reduce_sum", lambda x: x.sum((0, 1)), MATRIX, ((0,),), True),
        ("reduce_sum", lambda x: x.sum(1), MATRIX, ((0,),), False),
        ("reduce_max", lambda x: x.max(0), MATRIX, ((0,),), False),
        ("dot_general", lambda x, y: lax.dot_general(x, y, FIRST), TWO, ((0,), (0,)), True),
        ("dot_general", lambda x, y: lax.dot_general(x, y, FIRST), TWO, ((0,), ()), False),
        ("dot_general", lambda x, y: lax.dot_general(x, y, FIRST), TWO, ((0,), (1,)), False),
        ("dot_general", jnp.matmul, TWO, ((0,), (0,)), False),
    ],
)
def test_sums_over_rows(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ins: tuple[Dims, ...],
    expected: bool,
) -> None:
    eqn = equation(name, function, *args)
    assert is_sum_over_rows(eqn, rows_of(eqn, ins)) is expected


def test_gradient_of_a_kernel_is_a_sum_over_rows() -> None:
    """Its images and the slopes of its results are summed over their batch."""
    program = jax.make_jaxpr(kernel_gradient)(*IMAGES).jaxpr
    convs = [eqn for eqn in program.eqns if eqn.primitive.name == "conv_general_dilated"]
    eqn = convs[-1]
    numbers = eqn.params["dimension_numbers"]
    batch = (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)
    assert is_sum_over_rows(eqn, rows_of(eqn, batch))
    assert not is_sum_over_rows(eqn, rows_of(eqn, (batch[0], ())))
    assert not is_sum_over_rows(convs[0], rows_of(convs[0], ((0,), ())))


@pytest.mark.parametrize(
    ("ins", "expected"),
    [
        (((), (0,), (0,)), True),
        (((0,), (0,), (0,)), False),
        (((), (), (0,)), False),
        (((), (0,), ()), False),
        (((), (0,), (1,)), False),  # the columns of the update are a window
        (((), (1,), (0,)), False),  # the last dimension is that of the indices
    ],
)
def test_rows_are_added_to_zeros(ins: tuple[Dims, ...], expected: bool) -> None:
    args = floats(8, 6), integers(4), floats(4, 6)
    eqn = equation("scatter-add", lambda t, i, u: t.at[i].add(u), *args)
    assert is_added_to_zeros(eqn, rows_of(eqn, ins)) is expected
    other = equation("scatter", lambda t, i, u: t.at[i].set(u), *args)
    assert not is_added_to_zeros(other, rows_of(other, ins))


def selected(flags: Any, x: Any, y: Any) -> Any:
    return lax.select(flags > 0, x, y)


SUM, ZEROS, OTHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("name", "function", "args", "kinds", "expected"),
    [
        ("neg", jnp.negative, MATRIX, [SUM], True),
        ("transpose", lambda x: x.T, MATRIX, [SUM], True),
        ("reduce_sum", lambda x: x.sum(0), MATRIX, [SUM], True),
        ("tanh", jnp.tanh, MATRIX, [SUM], False),
        ("add", jnp.add, TWO, [SUM, SUM], True),
        ("add", jnp.add, TWO, [SUM, ZEROS], True),
        ("add", jnp.add, TWO, [SUM, OTHER], False),
        ("concatenate", lambda x, y: jnp.concatenate([x, y]), TWO, [SUM, OTHER], False),
        ("mul", jnp.multiply, TWO, [SUM, OTHER], True),
        ("mul", jnp.multiply, TWO, [SUM, SUM], False),
        ("mul", jnp.multiply, TWO, [OTHER, OTHER], False),
        ("dot_general", jnp.matmul, TWO, [OTHER, SUM], True),
        ("dot_general", jnp.matmul, TWO, [SUM, SUM], False),
        ("div", jnp.divide, TWO, [SUM, OTHER], True),
        ("div", jnp.divide, TWO, [OTHER, SUM], False),
        ("div", jnp.divide, TWO, [SUM, SUM], False),
        ("div", lax.div, (integers(4), integers(4)), [SUM, OTHER], False),
        ("select_n", selected, (*TWO, TWO[0]), [OTHER, SUM, ZEROS], True),
        ("select_n", selected, (*TWO, TWO[0]), [OTHER, SUM, OTHER], False),
        ("select_n", selected, (*TWO, TWO[0]), [SUM, SUM, SUM], False),
        ("pad", lambda x, y: lax.pad(x, y[0, 0], ((1, 1, 0),) * 2), TWO, [SUM, ZEROS], True),
        ("pad", lambda x, y: lax.pad(x, y[0, 0], ((1, 1, 0),) * 2), TWO, [SUM, OTHER], False),
        ("slice", lambda x: x[:2], MATRIX, [SUM], True),
        ("slice", lambda x: x[:2], MATRIX, [OTHER], False),
        (
            "dynamic_slice",
            lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)),
            (floats(4, 6), integers()),
            [SUM, SUM, OTHER],
            False,
        ),
        (
            "convert_element_type",
            lambda x: x.astype(jnp.float32),
            (jax.ShapeDtypeStruct((4,), jnp.bfloat16),),
            [SUM],
            True,
        ),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16), MATRIX, [SUM], False),
        ("convert_element_type", lambda x: x.astype(jnp.int32), MATRIX, [SUM], False),
    ],
)
def test_operations_that_are_linear_in_sums(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kinds: list[tuple[bool, bool]],
    expected: bool,
) -> None:
    eqn = equation(name, function, *args)
    sums, zeros = zip(*kinds, strict=True)
    assert bool(is_linear(eqn, sums, zeros)) is expected


@pytest.mark.parametrize(
    ("name", "function", "args", "changes"),
    [
        (
            "broadcast_in_dim",
            lambda x: jnp.broadcast_to(x, (3, 4, 6)),
            MATRIX,
            {"shape": (3, 2, 6)},
        ),
        ("reshape", lambda x: x.reshape(24), MATRIX, {"new_sizes": (12,)}),
        ("slice", lambda x: x[:, 1:3], MATRIX, {"limit_indices": (2, 3)}),
        (
            "dynamic_slice",
            lambda x: lax.dynamic_slice_in_dim(x, x[0, 0].astype(int), 2, 1),
            MATRIX,
            {"slice_sizes": (2, 2)},
        ),
        (
            "gather",
            lambda x, i: x[:, i],
            (floats(4, 6), integers(3)),
            {"slice_sizes": (2, 1)},
        ),
        ("neg", jnp.negative, MATRIX, {}),
    ],
)
def test_parameters_for_half_of_the_rows(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], changes: dict[str, Any]
) -> None:
    """Inputs have 4 rows of 6 columns, and a part has 2 of them."""
    eqn = equation(name, function, *args)
    out = tuple({4: 2, 24: 12}.get(size, size) for size in eqn.outvars[0].aval.shape)
    given = [tuple({4: 2}.get(size, size) for size in var.aval.shape) for var in eqn.invars]
    assert with_fewer(eqn, [out], given) == {**eqn.params, **changes}
