"""Patch of `jax.device_put` on several processes: equal 64-bit arrays and NaN count as equal.

`jax.device_put(values, sharding)` checks that all processes pass the same values. It compares them
with copies that were rounded to 32 bits, and by `==`. An array such as `np.array([0.1])`, which is
float64, and every NaN therefore raised "not the same on each process" (JAX 0.10.2).

This module passes the bits of the values, in the type that JAX stores, to the same check.

`tests/end_to_end/test_own_mesh.py` fails when the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nbdist.worker.runtime.tested_versions import is_tested

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def apply() -> None:
    """Patch the tested versions of JAX; for other versions log a warning."""
    if is_tested("JAX", jax.__version__, "jax.device_put compares NaN as different"):
        multihost_utils.assert_equal = _patched(multihost_utils.assert_equal)


def _patched(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def assert_equal(in_tree: Any, fail_message: str = "") -> None:
        try:
            check(jax.tree.map(_bits, in_tree), fail_message)
        except AssertionError:
            raise AssertionError(fail_message) from None

    return assert_equal


def _bits(value: Any) -> Any:
    """Return the bytes of a value as JAX stores it; keys and arrays of several processes stay."""
    if isinstance(value, jax.Array) and (
        not value.is_fully_addressable or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    ):
        return value
    array = np.asarray(value)
    stored = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return stored.reshape(-1).view(np.uint8)
