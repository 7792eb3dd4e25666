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

    from benchmarks.case import Scale

RUNS = 41
CALLS = 500
MOST_MORE_S = 20e-6


def cases(scale: Scale) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NBDIST_PLACEMENTS"] = f"{folder}/placements.sqlite"
        try:
            yield from _cases(scale)
        finally:
            del os.environ["NBDIST_PLACEMENTS"]


def _cases(scale: Scale) -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    small = jnp.ones((16, 16))
    layer = {"w": small, "b": jnp.ones(16)}
    yield _case(scale, "3 arrays", lambda a, b, c: a + b * c, small, small, jnp.float32(2))
    yield _case(
        scale, "16 arrays", lambda tree, x: jax.tree.map(lambda y: y + x, tree), [layer] * 8, 1.0
    )


def _case(scale: Scale, name: str, function: Callable[..., Any], *args: Any) -> Case:
    import jax

    from nbdist.parallel.autoplace.decorator import autoplace

    runs, calls = scale.of((RUNS, CALLS), (1, 2))
    ours, bare = autoplace(function), jax.jit(function)
    ours(*args)
    a, b = interleave(
        lambda: _seconds(ours, args, calls), lambda: _seconds(bare, args, calls), runs
    )
    return Case(
        f"added time of a decided call with {name}, against the 20 µs allowed",
        median(a) - median(b),
        MOST_MORE_S,
        unit="s",
        target=1.0,
        runs=runs,
    )


def _seconds(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Return the mean seconds of many calls. Waits for the result of the last one."""
    import jax

    result = function(*args)
    began = time.perf_counter()
    for _ in range(calls):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls
