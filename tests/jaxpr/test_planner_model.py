"""Planner model of a step's jaxpr: tied dimensions and the cost of operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.optimizer_state import states_of
from tests.plan_models import model_of_program, tensor, traced
from tests.plan_programs import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model, Op

GB = 10**9


def flops_of(ops: tuple[Op, ...]) -> float:
    """Count floating-point operations of dots and convolutions; loops count once per iteration."""
    return sum(op.times * (op.flops + flops_of(op.body)) for op in ops)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def ties(model: Model) -> str:
    """Return the dimensions of all inputs, one letter for each group.

    Upper case marks a blocked group, a dot a dimension of size 1.
    """
    letters: dict[int, str] = {-1: "."}
    words = []
    for found in model.tensors:
        word = ""
        for group in found.value.groups:
            letter = letters.setdefault(group, chr(ord("a") + len(letters) - 1))
            word += letter.upper() if group >= 0 and model.groups[group].blocked else letter
        words.append(word)
    return " ".join(words)


def conv(x: Any, kernel: Any, groups: int = 1) -> Any:
    numbers = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: function(*args).sum())


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

MATRIX = (floats(4, 6),)
SQUARE = (floats(6, 6),)
IMAGES = floats(2, 8, 8, 4)


@pytest.mark.parametrize(
    ("function", "arguments", "tied"),
    [
        pytest.param(jnp.add, (floats(4, 6), floats(4, 6)), "ab ab", id="element by element"),
        pytest.param(jnp.add, (floats(4, 6), floats(1, 6)), "ab .b", id="size 1"),
        pytest.param(jnp.add, (floats(4, 6), floats(6)), "ab b", id="broadcasting"),
        pytest.param(jnp.matmul, (floats(4, 6), floats(6, 8)), "ab bc", id="dot"),
        pytest.param(
            jnp.matmul, (floats(3, 4, 6), floats(3, 6, 8)), "abc acd", id="dot with batch"
        ),
        pytest.param(
            lambda x, y, z: x @ y + z,
            (floats(4, 6), floats(6, 8), floats(4, 8)),
            "ab bc ac",
            id="result of a dot",
        ),
        pytest.param(lambda x: x + x.T, SQUARE, "aa", id="transpose"),
        pytest.param(conv, (IMAGES, floats(3, 3, 4, 8)), "aBCd EFdg", id="conv"),
        pytest.param(
            lambda x, k: conv(x, k, 2), (IMAGES, floats(3, 3, 2, 8)), "aBCD EFgH", id="groups"
        ),
        pytest.param(
            lambda x, y: x.reshape(4, 6) + y, (floats(4, 2, 3), floats(4, 6)), "abC ab", id="merge"
        ),
        pytest.param(
            lambda x, y: x.reshape(4, 2, 3) + y,
            (floats(4, 6), floats(4, 2, 3)),
            "ab abC",
            id="split",
        ),
        pytest.param(lambda x, y: x.sum(0) + y, (floats(4, 6), floats(6)), "ab b", id="reduce"),
        pytest.param(
            lambda x, y: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)) + y,
            (floats(4, 6), floats(6)),
            "ab b",
            id="reduce by a function",
        ),
        pytest.param(
            lambda table, rows: table[rows], (floats(8, 6), integers(4)), "ab c", id="gather"
        ),
        pytest.param(
            lambda x, at: jnp.take_along_axis(x, at, 1),
            (floats(4, 6), integers(4, 2)),
            "ab ac",
            id="gather with batching",
        ),
        pytest.param(
            lambda table, rows, new: table.at[rows].add(new),
            (floats(8, 6), integers(4), floats(4, 6)),
            "ab c cb",
            id="scatter",
        ),
        pytest.param(
            lambda table, rows, new: table.at[rows].max(new),
            (floats(8, 6), integers(4), floats(4, 6)),
            "ab c cb",
            id="scatter of the largest",
        ),
        pytest.param(
            jax.vmap(lambda table, row, new: table.at[row].add(new)),
            (floats(4, 8, 6), integers(4), floats(4, 6)),
            "abc a ac",
            id="scatter with batching",
        ),
        pytest.param(
            lambda x, xs: lax.scan(lambda c, y: (c + y, c * y), x, xs),
            (floats(4), floats(3, 4)),
            "a Ba",
            id="scan",
        ),
        pytest.param(
            lambda x, y: lax.while_loop(
                lambda s: s[0].sum() < 9, lambda s: (s[0] + s[1].T, s[1]), (x, y)
            ),
            (floats(4, 6), floats(6, 4)),
            "ab ba",
            id="while",
        ),
        pytest.param(
            lambda x, y: lax.cond(x.sum() > 0, lambda a, b: a + b.T, lambda a, b: a, x, y),
            (floats(4, 6), floats(6, 4)),
            "ab ba",
            id="cond",
        ),
        pytest.param(
            gradient(jax.checkpoint(lambda x, w: jnp.sin(x @ w))),
            (floats(4, 6), floats(6, 8)),
            "ab bc",
            id="remat",
        ),
        pytest.param(
            lambda x, y: doubled(x) + y, (floats(4, 6), floats(4, 6)), "ab ab", id="custom_vjp"
        ),
        pytest.param(lambda x: lax.top_k(x, 2), MATRIX, "aB", id="top_k"),
        pytest.param(lambda x: jnp.cumsum(x, 0), MATRIX, "Ab", id="cumsum"),
        pytest.param(lambda x: jnp.sort(x, 0), MATRIX, "Ab", id="sort"),
        pytest.param(lambda x: jnp.flip(x, 1), MATRIX, "aB", id="rev"),
        pytest.param(
            lambda x, y: jnp.concatenate([x, y], 1),
            (floats(4, 6), floats(4, 2)),
            "aB aC",
            id="concatenate",
        ),
        pytest.param(lambda x: jnp.split(x, 2, 1)[0], MATRIX, "aB", id="split in two"),
        pytest.param(
            lambda x, y: jnp.stack([x, y]).sum(0), (floats(4, 6), floats(4, 6)), "ab ab", id="stack"
        ),
        pytest.param(
            gradient(lambda x, y: jnp.stack([x, y]) ** 2),
            (floats(4, 6), floats(4, 6)),
            "ab ab",
            id="unstack",
        ),
        pytest.param(
            lambda x, y: lax.bitcast_convert_type(x, jnp.int32) + y,
            (floats(4, 6), integers(4, 6)),
            "ab ab",
            id="bitcast",
        ),
        pytest.param(
            lambda x: lax.bitcast_convert_type(x, jnp.int8).sum(-1), MATRIX, "ab", id="bytes"
        ),
        pytest.param(
            gradient(
                lambda x: lax.reduce_window(
                    x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
                )
            ),
            (IMAGES,),
            "aBCd",
            id="select_and_scatter",
        ),
        pytest.param(
            lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0),
            (jax.random.key(0), floats(4, 6)),
            " ab",
            id="dropout",
        ),
    ],
)
def test_dimensions_sharded_together_are_tied(
    function: Callable[..., Any], arguments: tuple[Any, ...], tied: str
) -> None:
    model = traced(lambda carried, read, batch: function(*carried), arguments)
    assert ties(model) == tied
    assert not [note for note in model.notes if "there is no rule" in note]


def test_first_part_of_split_dimension_is_sharded() -> None:
    """Attention heads: a sharded whole dimension is sharded by heads, if there are enough."""
    model = traced(lambda x, _, __: x.reshape(4, 2, 6), floats(4, 12))
    assert ties(model) == "ab"
    assert model.groups[tensor(model, "").value.groups[1]].divisor == 2


def test_unknown_operation_is_not_sharded_and_noted() -> None:
    model = traced(lambda x, _, __: jnp.fft.fft(x).real, floats(4, 6))
    assert ties(model) == "AB"
    assert model.notes == (
        "there is no rule for the operation fft: its dimensions are not sharded",
    )


def test_gradient_of_a_condition_is_known() -> None:
    def loss(w: Any) -> Any:
        return jax.lax.cond(w.sum() > 0, lambda w: jnp.sin(w).sum(), lambda w: 0.0, w)

    assert not traced(lambda w, _, __: jax.grad(loss)(w), floats(4, 6)).notes


def test_parts_of_a_function_that_is_one_operation_are_known() -> None:
    """From JAX 0.12 on, JAX replaces `ldexp` by its parts when it compiles a program."""
    model = traced(lambda x, _, __: jnp.ldexp(x, 2).sum(), floats(4, 6))
    assert not model.notes


def test_batch_rows_are_one_group() -> None:
    model = traced(
        lambda w, _, b: (b["x"] @ w).sum() + b["y"].sum(),
        floats(6, 8),
        (),
        {"x": floats(16, 6), "y": floats(16)},
    )
    assert ties(model) == "ab ca c"
    assert model.rows == 16
    assert model.batch_groups == set(tensor(model, "['y']").value.groups)


def test_unused_inputs_are_marked() -> None:
    def step(carried: Any, read: Any, batch: Any) -> Any:
        del read
        return carried["w"] * 2, carried["kept"], (carried["w"] + carried["unused"], batch)[0].shape

    model = traced(step, {n: floats(4) for n in ("w", "kept", "unused")}, floats(3), floats(8))
    used = {t.path: t.used for t in model.tensors if t.role == "carried"}
    assert used == {"['kept']": True, "['unused']": False, "['w']": True}
    sharded = ShardedModel(model, Layout(1, 1), states_of(model))
    assert [sharded.device_bytes(t) for t in model.tensors] == [16, 0, 16, 0, 0]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_random_keys_take_the_bytes_of_their_data(kind: str) -> None:
    key = jax.random.key(0, impl=kind)
    model = traced(lambda k, _, __: jax.random.split(k, 3)[0], key)
    assert model.tensors[0].value.nbytes == jax.random.key_data(key).nbytes


def test_products_cost_two_operations_per_term() -> None:
    product = traced(lambda x, _, b: b @ x, floats(6, 8), (), floats(4, 6))
    assert flops_of(product.ops) == 2 * 4 * 6 * 8
    batched = traced(lambda x, _, b: b @ x, floats(3, 6, 8), (), floats(3, 4, 6))
    assert flops_of(batched.ops) == 2 * 3 * 4 * 6 * 8


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_cost_depends_on_kernel(groups: int) -> None:
    kernel = floats(3, 5, 4 // groups, 8)
    model = traced(lambda k, _, x: conv(x, k, groups), kernel, (), IMAGES)
    results = math.prod((2, 8, 8, 8))
    assert flops_of(model.ops) == 2 * results * 3 * 5 * (4 // groups)


def test_scan_body_counts_once_per_iteration() -> None:
    def layers(w: Any, _: Any, x: Any) -> Any:
        return lax.scan(lambda c, own: (jnp.tanh(c @ own), None), x, w)[0].sum()

    forward = traced(layers, floats(5, 6, 6), (), floats(4, 6))
    assert flops_of(forward.ops) == 5 * 2 * 4 * 6 * 6
    both = traced(jax.grad(layers), floats(5, 6, 6), (), floats(4, 6))
    assert flops_of(both.ops) == 3 * flops_of(forward.ops)


def test_remat_counts_recomputed_operations() -> None:
    def layers(w: Any, _: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda c, own: (jnp.tanh(c @ own), None))
        return lax.scan(body, x, w)[0].sum()

    model = traced(jax.grad(layers), floats(5, 6, 6), (), floats(4, 6))
    assert flops_of(model.ops) == 4 * 5 * 2 * 4 * 6 * 6


def test_remat_around_a_scan_counts_recomputation() -> None:
    """JAX turns the checkpoint into a call that names its program differently."""

    def layers(w: Any, _: Any, x: Any) -> Any:
        through = jax.checkpoint(lambda x: lax.scan(lambda c, o: (jnp.tanh(c @ o), None), x, w)[0])
        return through(x).sum()

    model = traced(jax.value_and_grad(layers), floats(5, 6, 6), (), floats(4, 6))
    assert flops_of(model.ops) == 4 * 5 * 2 * 4 * 6 * 6


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_operations_of_test_models_are_known(name: str) -> None:
    model = model_of_program(name)
    assert model.notes == ()
    assert all(t.used for t in model.tensors)
    assert all(t.value.sizes for t in model.tensors if t.role == "batch")
