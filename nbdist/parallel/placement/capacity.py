"""Check that arrays fit into the memory of their devices."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import fault_of
from nbdist.parallel.placement.targets import is_there
from nbdist.views import formatting
from nbdist.worker.jax.runtime import platforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device
    from jax.sharding import Sharding

    from nbdist.parallel.placement.leaves import Leaf

_UNCHECKED_BYTES = 64 << 20
"""Bytes below which nothing is checked: to read the free memory takes as long as to move a part."""


def is_small(tree: Any) -> bool:
    """Return True if it is one small array of one process, for which memory is not checked."""
    return (
        isinstance(tree, (np.ndarray, jax.Array))
        and tree.nbytes < _UNCHECKED_BYTES
        and jax.process_count() == 1
        and not fault_of(tree)
    )


def check(leaves: Sequence[Leaf], shardings: Sequence[Sharding]) -> None:
    """Check that there is memory for the arrays to move.

    Raises:
        UsageError: there is not; the error lists the missing bytes on each device.
    """
    if sum(leaf.nbytes for leaf in leaves) < _UNCHECKED_BYTES:
        return
    lacking = [
        f"{room} needs {formatting.size(needed)}, and {formatting.size(free)} are "
        f"free: {formatting.size(needed - free)} are missing"
        for room, needed, free in _rooms(needs(leaves, shardings))
        if needed > free
    ]
    if lacking:
        raise UsageError(
            f"the arrays do not fit: {'; '.join(lacking)}. Shard them over more devices "
            '(where="full"), use a smaller type (bfloat16), or delete other arrays'
        )


def needs(leaves: Sequence[Leaf], shardings: Sequence[Sharding]) -> dict[Device, int]:
    """Return the additional bytes on each of this process's devices."""
    found: dict[Device, int] = defaultdict(int)
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if not is_there(leaf, sharding):
            part = part_bytes(leaf.shape, leaf.nbytes, sharding)
            for device in sharding.addressable_devices:
                found[device] += part
    return found


def part_bytes(shape: tuple[int, ...], nbytes: int, sharding: Sharding) -> int:
    """Return the bytes of an array on each device; the largest part if they differ."""
    elements: int = math.prod(sharding.shard_shape(shape))
    return nbytes // max(1, math.prod(shape)) * elements


def _rooms(needed: dict[Device, int]) -> list[tuple[str, int, int]]:
    """Return memories with needed and free bytes; all CPUs share that of their host."""
    rooms, shared = [], 0
    for device, nbytes in needed.items():
        free = platforms.free_bytes(device)
        if device.platform == "cpu":
            shared += nbytes
        elif free is not None:
            rooms.append((platforms.name_of(device), nbytes, free))
    if shared:
        cpu = next(device for device in needed if device.platform == "cpu")
        rooms.append(("the host's memory", shared, platforms.free_bytes(cpu) or 0))
    return rooms
