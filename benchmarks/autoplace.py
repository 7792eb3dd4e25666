"""Calls of a decided `@autoplace` function, against the bare jitted function.

The target is an overhead of 20 µs. Both sides are called alternately, thousands of times each.
"""

from __future__ import annotations

import os
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNS = 41
CALLS = 500
MOST_MORE_S = 20e-6


def cases() -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NBDIST_PLACEMENTS"] = f"{folder}/placements.sqlite"
        try:
            yield from _cases()
        finally:
            del os.environ["NBDIST_PLACEMENTS"]


def _cases() -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    small = jnp.ones((16, 16))
    layer = {"w": small, "b": jnp.ones(16)}
    yield _case("3 arrays", lambda a, b, c: a + b * c, small, small, jnp.float32(2))
    yield _case("16 arrays", lambda tree, x: jax.tree.map(lambda y: y + x, tree), [layer] * 8, 1.0)


def _case(name: str, function: Callable[..., Any], *args: Any) -> Case:
    import jax

    from nbdist.parallel.autoplace.decorator import autoplace

    ours, bare = autoplace(function), jax.jit(function)
    ours(*args)
    a, b = interleave(lambda: _seconds(ours, args), lambda: _seconds(bare, args), RUNS)
    return Case(
        f"a decided call of {name} beyond the bare jitted one, over 20 µs",
        median(a) - median(b),
        MOST_MORE_S,
        unit="s",
        target=1.0,
        runs=RUNS,
    )


def _seconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the mean seconds of many calls. Waits for the result of the last one."""
    import jax

    result = function(*args)
    began = time.perf_counter()
    for _ in range(CALLS):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / CALLS
