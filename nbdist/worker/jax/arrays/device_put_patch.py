"""Patches of `jax.device_put` and of the argument `device` of `jax.numpy` on several processes.

`jax.device_put(values, sharding)` checks that all processes pass the same values. It compares them
with copies that were rounded to 32 bits, and by `==`. An array such as `np.array([0.1])`, which is
float64, and every NaN therefore raised "not the same on each process" (JAX 0.10.2). This module
passes the bits of the values, in the type that JAX stores, to the same check.

`jax.device_put(values, device)` refuses arrays that a training loop has replicated over all
processes, and a device of another process gives arrays without values. This module puts the own
copy of such arrays on the device. For a device of another process, such as `jax.devices()[0]`, it
takes the own device at the same place, also in `jnp.asarray(values, device=jax.devices()[0])`.

`tests/end_to_end/test_own_mesh.py` and `test_lifted_loops_jax.py` fail when the patches are no
longer needed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from nbdist.private_api.jax import numpy_util as util
from nbdist.worker.jax.arrays.default_device_patch import own_device

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def apply() -> None:
    """Patch `jax.device_put`."""
    multihost_utils.assert_equal = _patched(multihost_utils.assert_equal)
    jax.device_put = _on_own_device(jax.device_put)
    util.canonicalize_device_to_sharding = _of_own_device(util.canonicalize_device_to_sharding)


def _on_own_device(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def device_put(x: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(device, jax.Device) and jax.process_count() > 1:
            x = jax.tree.map(_own_copy, x)
            device = own_device(device, "jax.device_put: each rank uses its own device")
        return upstream(x, device, *args, **kwargs)

    return device_put


def _of_own_device(upstream: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(upstream)
    def canonicalize_device_to_sharding(device: Any) -> Any:
        if isinstance(device, jax.Device):
            device = own_device(device, "jax.numpy: each rank uses its own device")
        return upstream(device)

    return canonicalize_device_to_sharding


def _own_copy(leaf: Any) -> Any:
    """Return this process's copy of an array that all processes have."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    is_copied = leaf.is_fully_replicated and not leaf.is_fully_addressable
    return leaf.addressable_data(0) if is_copied else leaf


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
