"""Texts of programs: equal for equal programs only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from nbdist.worker.planning.program_text import program_text

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def step(x: Any, scale: float = 2.0, axis: int = 0) -> Any:
    def layer(x: Any, _: Any) -> Any:
        return jax.nn.relu(x) * scale, x.sum(axis)

    return jax.lax.scan(layer, jax.nn.silu(x), None, length=3)


def text(*args: Any, **options: Any) -> str:
    jax.clear_caches()  # otherwise two traces share inner programs
    return program_text(jax.jit(lambda x: step(x, **options)).trace(*args).jaxpr)


def test_the_same_step_traced_twice_has_one_text() -> None:
    assert text(X) == text(X)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (jax.ShapeDtypeStruct((4, 6), jnp.float32), {}),
        (jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), {}),
        (X, {"scale": 3.0}),
        (X, {"axis": 1}),
    ],
    ids=["shape", "type", "literal of an inner program", "parameter of an inner program"],
)
def test_another_step_has_another_text(x: Any, options: dict[str, Any]) -> None:
    assert text(x, **options) != text(X)


def test_order_of_operands_and_results_matters() -> None:
    def of(function: Any) -> str:
        return program_text(jax.make_jaxpr(function)(X, X))

    texts = [
        of(lambda a, b: (a - b, a)),
        of(lambda a, b: (b - a, a)),
        of(lambda a, b: (a - b, b)),
        of(lambda a, b: (a, a - b)),
    ]
    assert len(set(texts)) == len(texts)


def test_kernels_that_read_other_blocks_have_other_texts() -> None:
    def of(index_map: Any) -> str:
        def copied(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...]

        def run(x: Any) -> Any:
            spec = pl.BlockSpec((1, 8), lambda row: (row, 0))
            read = pl.BlockSpec((1, 8), index_map)
            return pl.pallas_call(
                copied, grid=(4,), in_specs=[read], out_specs=spec, out_shape=X, interpret=True
            )(x)

        return program_text(jax.make_jaxpr(run)(X))

    maps = (lambda row: (row, 0)), (lambda row: (row ^ 1, 0)), (lambda _: (0, 0))
    assert len({of(one) for one in maps}) == len(maps)
    assert of(maps[1]) == of(maps[1])


def test_inner_programs_are_written_once_and_differ() -> None:
    one, other = (jax.jit(lambda x, n=n: x * n) for n in (2.0, 3.0))

    def of(*called: Any) -> str:
        def chain(x: Any) -> Any:
            for function in called:
                x = function(x)
            return x

        return program_text(jax.make_jaxpr(chain)(X))

    assert len({of(one, one), of(one, other), of(other, one), of(other, other)}) == 4
    assert of(one, one, one).count("2.0") == of(one).count("2.0")
