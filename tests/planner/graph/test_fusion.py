"""Values of a step that a compiler writes to memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.planner.graph.fusion import fused
from tests.plan_models import traced

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Op


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def fused_ops(function: Callable[..., Any], *arguments: Any) -> tuple[Op, ...]:
    model = traced(lambda carried, read, batch: function(*carried), arguments)
    return fused(model.ops, model.results)


@pytest.mark.parametrize(
    ("function", "arguments", "sizes"),
    [
        (jnp.matmul, (floats(4, 6), floats(6, 8)), [24, 48]),
        (lambda x, y, w: (x + y) @ w, (floats(4, 6),) * 2 + (floats(6, 8),), [24, 48]),
        (
            lambda x, y, w: (x + y).reshape(4, 6) @ w,
            (floats(4, 2, 3),) * 2 + (floats(6, 8),),
            [24, 48],
        ),
        (lambda x: x @ x.T, (floats(4, 6),), [24, 24]),
        (lambda w: jnp.ones((4, 6)) @ w, (floats(6, 8),), [24, 48]),
        (
            lambda x, y, w: jnp.broadcast_to(x * y, (16, 6)) @ w,
            (floats(6),) * 2 + (floats(6, 8),),
            [96, 48],
        ),
        (lambda w: jax.nn.one_hot(jnp.arange(4), 6) @ w, (floats(6, 8),), [24, 48]),
    ],
)
def test_product_reads_two_factors(
    function: Callable[..., Any], arguments: tuple[Any, ...], sizes: list[int]
) -> None:
    (product,) = [op for op in fused_ops(function, *arguments) if op.kind == "dot"]
    assert [value.size for value in product.ins] == sizes


def test_elementwise_chain_is_fused() -> None:
    (only,) = fused_ops(lambda x, y: jnp.tanh(x + y) * 2, floats(4, 6), floats(4, 6))
    assert {value.size for value in only.ins} == {24, 1}


def test_reshaped_result_is_written() -> None:
    operations = fused_ops(lambda x, y: (x + y).reshape(24), floats(4, 6), floats(4, 6))
    assert [op.name for op in operations] == ["add"]


@pytest.mark.parametrize(
    ("factor", "read"),
    [
        (jax.nn.relu, "x"),
        (lambda x: 2 * x + jnp.arange(6), "x"),
        (lambda x: jnp.where(x > 0, x, 0).reshape(6, 4).T.reshape(4, 6), "x"),
        (jnp.tanh, "its own"),
        (lambda x: x * jnp.tanh(x), "its own"),
        (lambda x: x.astype(jnp.float16), "its own"),
    ],
    ids=["relu", "affine", "where", "tanh", "with tanh", "narrower"],
)
def test_cheap_factors_are_fused_into_products_on_tpus(
    factor: Callable[..., Any], read: str
) -> None:
    """On other devices, the value is written once and both products read it."""

    def function(x: Any, left: Any, right: Any) -> Any:
        value = factor(x)
        return value @ left.astype(value.dtype), value.T @ right.astype(value.dtype), x

    shapes = floats(4, 6), floats(6, 8), floats(4, 8)
    model = traced(lambda carried, read, batch: function(*carried), shapes)
    input_number = model.tensors[0].value.number
    for into_products, expected in ((True, read), (False, "its own")):
        ops = fused(model.ops, model.results, into_products=into_products)
        factors = {op.ins[0].number for op in ops if op.kind == "dot"}
        assert len(factors) == 1
        assert (factors == {input_number}) == (expected == "x")
