"""Placement of arrays on devices of several processes.

`jax.device_put` gathers NumPy arrays on all processes to compare them. This takes seconds for some
megabytes, and reports NaN values as different (JAX 0.10.2).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.errors import UsageError
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

    from nbdist.parallel.placement.leaves import Leaf


def move_all(leaves: Sequence[Leaf], shardings: Sequence[Sharding]) -> list[Any]:
    """Move arrays; every process must call this with as many arrays.

    Raises:
        UsageError: values differ between processes, or no process has all of an array. All
            processes raise the same error.
    """
    keys = [_key_kind(leaf.value) for leaf in leaves]
    leaves = [
        leaf._replace(value=jax.random.key_data(leaf.value)) if kind else leaf
        for leaf, kind in zip(leaves, keys, strict=True)
    ]
    sources = [_source(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    shared = [
        index
        for index, sharding in enumerate(shardings)
        if isinstance(sources[index], _Whole) and _is_shared(sharding)
    ]
    if shared:
        _require_alike([leaves[i] for i in shared], [sources[i].data for i in shared])
    moved = [
        source.over(sharding) if isinstance(source, _Whole) else jax.device_put(source, sharding)
        for source, sharding in zip(sources, shardings, strict=True)
    ]
    return [
        jax.random.wrap_key_data(array, impl=kind) if kind else array
        for array, kind in zip(moved, keys, strict=True)
    ]


def _key_kind(value: Any) -> Any:
    """Return the implementation of random keys, which `device_put` cannot move; else None."""
    is_keys = isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return jax.random.key_impl(value) if is_keys else None


def _is_shared(sharding: Sharding) -> bool:
    """Return True if a sharding spans several processes, the same in all of them."""
    return len({device.process_index for device in sharding.device_set}) > 1


class _Whole:
    """A whole array in this process's memory.

    Args:
        value: an array or a number.
    """

    def __init__(self, value: Any) -> None:
        data = np.asarray(value)
        self.data = data.astype(jax.dtypes.canonicalize_dtype(data.dtype), copy=False)

    def over(self, sharding: Sharding) -> jax.Array:
        made: jax.Array = jax.make_array_from_callback(
            self.data.shape, sharding, lambda index: self.data[index], dtype=self.data.dtype
        )
        return made


def _source(leaf: Leaf, sharding: Sharding) -> Any:
    """Return the array if `device_put` can move it, else all of it; the same in all processes.

    Raises:
        UsageError: no process has all of it, or not every one.
    """
    value = leaf.value
    if not isinstance(value, jax.Array):
        return _Whole(value)
    if value.is_fully_addressable:
        return value if sharding.is_fully_addressable else _Whole(value)
    if value.sharding.device_set == sharding.device_set:
        return value
    there = {device.process_index for device in value.sharding.device_set}
    if not value.is_fully_replicated:
        raise UsageError(
            f"{leaf.name} is sharded over the devices of several processes, and no process has all "
            'of it: nbdist.place(x, "replicated") first'
        )
    if len(there) < jax.process_count():
        named = ", ".join(map(str, sorted(there)))
        raise UsageError(
            f"{leaf.name} is on devices of the processes {named} only, and all "
            "processes must take part in a move"
        )
    return _Whole(value.addressable_data(0))


def _require_alike(leaves: Sequence[Leaf], arrays: Sequence[np.ndarray]) -> None:
    """Raise UsageError on all processes if their bytes differ."""
    sums = processes.agree([zlib.crc32(np.ascontiguousarray(array).data) for array in arrays])
    wrong = [
        leaf.name for index, leaf in enumerate(leaves) if len(set(sums[:, index].tolist())) > 1
    ]
    if wrong:
        raise UsageError(
            f"the processes have different values of {', '.join(wrong)}: give place "
            "the same values, or make an array of each process's part with "
            "jax.make_array_from_process_local_data"
        )
