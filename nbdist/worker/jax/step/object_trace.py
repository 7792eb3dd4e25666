"""Trace of a step: records the slots that it rebinds, and restores the objects afterwards."""

from __future__ import annotations

import dataclasses
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from nbdist.private_api.jax import core
from nbdist.worker.jax.arrays.leaves import described
from nbdist.worker.jax.step.object_slots import container_of
from nbdist.worker.jax.step.object_values import leaves_in, objects_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.errors import StepError
    from nbdist.worker.jax.step.object_graph import Found

_NUMBERS = (bool, int, float, complex, np.generic)
_CONSTANTS = (*_NUMBERS, str, bytes, type(None))
_FINISHED = (*_CONSTANTS, type, np.ndarray)
_MISSING = object()
_COPIED_BYTES = 1 << 24
"""Limit in bytes for copies of NumPy arrays, which code can change in place; others are data."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Slot that the step rebinds.

    Attributes:
        found: Container of the slot.
        key: Key of the slot in the container.
        original: Value before the first step.
        kept: Identities of objects in the value that the step does not replace.
    """

    found: Found
    key: Any
    original: Any
    kept: frozenset[int] = frozenset()

    @property
    def place(self) -> tuple[int, Any]:
        return id(self.found.container.value), self.key

    @property
    def path(self) -> str:
        return f"{self.found.path}{self.found.container.word(self.key)}"

    @property
    def root(self) -> str:
        return self.found.root or str(self.key)

    def put(self, item: Any) -> None:
        self.found.container.put(self.key, item)


@dataclasses.dataclass(frozen=True)
class _Change:
    """Slot that was rebound while the step was traced."""

    slot: Slot
    new: Any

    @property
    def old(self) -> Any:
        return self.slot.original

    @property
    def is_near(self) -> bool:
        return self.slot.found.origin is not None

    def is_lasting(self) -> bool:
        """Return True if the new value is a constant, such as a shape: no step depends on it."""
        return all(isinstance(leaf, _FINISHED) for leaf in leaves_in(self.new))

    def is_state(self) -> bool:
        """Return True if the slot is state: the next step would read another value."""
        leaves = [leaf for value in (self.old, self.new) for leaf in leaves_in(value)]
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            return True
        return self.is_near and any(isinstance(leaf, _CONSTANTS) for leaf in leaves)


_CREATE = (
    "create it in an earlier cell, with the shape and type that the step assigns; to collect "
    "values, report them or use jax.debug.callback"
)
_ESCAPED = (
    "is set inside of jax.grad, jax.jit, jax.vmap or a JAX loop, where values exist only during "
    "the call: return the value from that function (jax.grad with has_aux=True), then set it"
)


class Trace:
    """Snapshot of the containers of the user's program before a step is traced.

    Args:
        containers: All containers.
        carried: Places of the carried slots.
        refuse: Makes the error for a slot and a fault.
    """

    def __init__(
        self,
        containers: Sequence[Found],
        carried: set[tuple[int, Any]],
        refuse: Callable[[Slot, str], StepError],
    ) -> None:
        self._before = [(found, found.container.contents()) for found in containers]
        self._copies = list(self._copied())
        self._trace = core.trace_ctx.trace
        self._known = {id(found.container.value) for found in containers}
        self._carried = carried
        self._refuse = refuse
        self._again = True

    def finish(self) -> None:
        """Keep the changes of a complete trace to lists and dicts besides its state."""
        self._again = False

    def rebound(self) -> list[Slot]:
        """Return the slots that the step rebinds, except the carried ones.

        Raises:
            StepError: A slot cannot be carried.
        """
        slots = [slot for slot, _ in self._changed_in_place()]
        for change in self._changes():
            if any(self._has_escaped(leaf) for leaf in leaves_in(change.new)):
                raise self._refuse(change.slot, _ESCAPED)
            if change.slot.place in self._carried:
                if change.new is _MISSING:
                    raise self._refuse(change.slot, "is deleted by the step")
            elif change.old is _MISSING:
                self._check_new(change)
            elif change.new is _MISSING:
                if change.is_near and not _is_opaque(change.old):
                    raise self._refuse(change.slot, "is deleted by the step")
            elif change.is_state():
                slots.append(self._slot(change))
        return slots

    def restore(self) -> None:
        """Restore the contents of the containers, except lasting changes."""
        for slot, copy in self._changed_in_place():
            slot.original[...] = copy
        for change in reversed(list(self._changes())):
            container, key = change.slot.found.container, change.slot.key
            if self._stays(change):
                continue
            if change.old is _MISSING:
                container.remove(key)
            else:
                container.put(key, change.old)

    def _stays(self, change: _Change) -> bool:
        """Return True if a change stays: another thread made it, or it holds for all steps."""
        if change.slot.place in self._carried or change.new is _MISSING or not change.is_lasting():
            return False
        return not (change.is_near and self._again)

    def _changes(self) -> Iterator[_Change]:
        for found, before in self._before:
            after = found.container.contents()
            if before.keys() == after.keys() and all(map(is_, before.values(), after.values())):
                continue
            for key in dict.fromkeys((*before, *after)):
                old, new = before.get(key, _MISSING), after.get(key, _MISSING)
                if old is not new and not _are_equal(old, new):
                    yield _Change(Slot(found, key, old), new)

    def _has_escaped(self, leaf: Any) -> bool:
        """Return True if a leaf is a tracer of a transformation within the step."""
        return isinstance(leaf, core.Tracer) and leaf._trace is not self._trace

    def _copied(self) -> Iterator[tuple[Slot, np.ndarray]]:
        """Yield copies of small NumPy arrays that the step can reach, the notebook's names last."""
        left = _COPIED_BYTES
        for found, items in sorted(self._before, key=lambda pair: not pair[0].path):
            for key, item in items.items() if found.origin is not None else ():
                if _is_changeable(item) and item.nbytes <= left:
                    left -= item.nbytes
                    yield Slot(found, key, item), item.copy()

    def _changed_in_place(self) -> Iterator[tuple[Slot, np.ndarray]]:
        for slot, copy in self._copies:
            if copy.tobytes() != slot.original.tobytes():
                yield slot, copy

    def _slot(self, change: _Change) -> Slot:
        if change.old is None or change.new is None:
            was, now = _outlined(change.old), _outlined(change.new)
            how = f"changes from {was} to {now} in the step: {_CREATE}"
            raise self._refuse(change.slot, how)
        inner = (id(part) for part in objects_in(change.new) if part is not change.new)
        kept = frozenset(part for part in inner if part in self._known)
        return dataclasses.replace(change.slot, kept=kept)

    def _check_new(self, change: _Change) -> None:
        leaves = leaves_in(change.new)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            self._refuse_new(change, _outlined(change.new))
        is_number = isinstance(change.new, _NUMBERS)
        if change.is_near and is_number and not isinstance(change.slot.key, int):
            self._refuse_new(change, repr(change.new))

    def _refuse_new(self, change: _Change, what: str) -> NoReturn:
        how = f"is new, and the step sets it to {what}: {_CREATE}"
        raise self._refuse(change.slot, how)


def _is_changeable(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.flags.writeable and not item.dtype.hasobject


def _are_equal(old: Any, new: Any) -> bool:
    return isinstance(old, _CONSTANTS) and type(old) is type(new) and bool(old == new)


def _is_opaque(value: Any) -> bool:
    return not any(isinstance(leaf, (jax.Array, *_CONSTANTS)) for leaf in leaves_in(value))


def _outlined(value: Any) -> str:
    if isinstance(value, jax.Array) or container_of(value) is None:
        return described(value)
    return f"a {type(value).__name__} with arrays"
