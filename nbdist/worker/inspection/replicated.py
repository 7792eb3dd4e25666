"""Replicated arrays of JAX, and their digests.

A replicated array over several processes has a copy on each. So has an array that each process
makes without a mesh. JAX does not compare the copies: if each rank draws values from a generator
with another seed, the copies differ.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.worker.checkpoint.digest import WHOLE_BYTES, chunks, of_array, of_sample
from nbdist.worker.inspection.digests import KnownNumbers, digest_of, found_under
from nbdist.worker.inspection.placement import readers
from nbdist.worker.inspection.types import Inside
from nbdist.worker.jax.arrays.leaves import as_data
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.records import Replicated

_CLOSED = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, type)


class ReplicatedArrays:
    """The replicated arrays of one rank. Each array is read once: arrays do not change."""

    def __init__(self) -> None:
        self._known = KnownNumbers()

    def under(self, names: Iterable[str], namespace: dict[str, Any]) -> tuple[Replicated, ...]:
        """Digest the replicated arrays behind names; waits until they are computed."""
        values = ((name, namespace[name]) for name in names if name in namespace)
        found = (self._under(name, value) for name, value in values)
        return tuple(each for each in found if each is not None)

    def _under(self, name: str, value: Any) -> Replicated | None:
        numbers: dict[str, int] = {}
        has_new = False
        for path, array in found_under(name, _arrays(name, value)):
            number = self._known.get(array)
            if number is None:
                has_new, number = True, _number(array)
                self._known.note(array, number)
            numbers[path] = number
        return digest_of(name, numbers, changed=has_new)


def _arrays(name: str, root: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the replicated arrays under a name, each once, with its path."""
    looks, seen = [*readers(), _own_object], set()
    waiting: list[tuple[str, Any]] = [(name, root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, jax.Array):
            if _is_replicated(value):
                yield path, value
            continue
        inside = next((found for look in looks if (found := look(value)) is not None), None)
        if isinstance(inside, Inside):
            parts = [("".join((path, *more)), part) for more, part in inside.parts]
            waiting.extend(reversed(parts))


def _own_object(value: Any) -> Inside | None:
    """Return the attributes of an object whose class the user defines."""
    if not is_users(type(value).__module__) or not type(value).__dictoffset__:
        return None
    return Inside([((f".{name}",), part) for name, part in vars(value).items()])


def _is_replicated(array: jax.Array) -> bool:
    """Return True if the array is replicated over all processes.

    An uncommitted array counts too: JAX copies it to all devices if another operand is there.
    """
    if isinstance(array, jax.core.Tracer) or array.is_deleted() or not array.size:
        return False
    if array.is_fully_addressable:
        return not array.committed
    if not array.is_fully_replicated:
        return False
    return _is_of_all_processes(array.sharding)


@functools.lru_cache(maxsize=256)
def _is_of_all_processes(sharding: jax.sharding.Sharding) -> bool:
    """Return True if the devices belong to all processes."""
    processes = {device.process_index for device in sharding.device_set}
    every: int = jax.process_count()
    return len(processes) == every


def _number(array: jax.Array) -> int:
    local = array.addressable_data(0)
    if array.nbytes <= WHOLE_BYTES:
        return of_array(as_data(local))
    if next(iter(local.devices())).platform == "cpu":
        flat = as_data(local).reshape(-1)  # without a copy
        return of_sample(flat[rows] for rows in chunks(flat.size, flat.itemsize))
    return of_array(as_data(sampled(array).addressable_data(0)))


def _sample(array: jax.Array) -> jax.Array:
    flat = array.reshape(-1)
    return jnp.concatenate([flat[rows] for rows in chunks(flat.size, flat.dtype.itemsize)])


sampled = jax.jit(_sample)
"""The sample of an array, taken on its device."""
