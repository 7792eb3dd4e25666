"""State that a step keeps in Python objects: the slots that it rebinds, carried as leaves.

A traced step that assigns `self.params` would leave a tracer there, and train nothing. Therefore
nbdist finds the slots that a trace rebinds, restores the objects, and traces again with tracers in
those slots. After every trace the objects contain concrete values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.arrays.leaves import is_array, is_spread
from nbdist.worker.jax.step.carried import Carried
from nbdist.worker.jax.step.object_graph import Found, walk
from nbdist.worker.jax.step.object_slots import container_of, is_data
from nbdist.worker.jax.step.object_trace import Slot, Trace
from nbdist.worker.jax.step.object_values import ObjectValues, leaves_in, objects_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Rebound:
    """Slots that a trace rebound but did not carry; the step must be traced again.

    Attributes:
        slots: The slots.
        whole: Names whose objects the step changes directly, although it received copies.
    """

    slots: list[Slot]
    whole: set[str]


class ObjectState:
    """Slots of the user's objects that a step rebinds.

    Attributes:
        carried: Values of the slots; empty until a trace finds some.
        rebound: Slots that the last trace found; None if it found none.

    Args:
        namespace: Namespace of the user.
        lines: Names that the step uses, each with its first line.
        copied: Those names whose values the step receives as copies.
        data: Source of the batches; another thread may change it during a trace.
    """

    def __init__(
        self, namespace: dict[str, Any], lines: dict[str, int], copied: set[str], data: Any
    ) -> None:
        self._namespace = namespace
        self._lines = lines
        self._copied = copied
        self._apart = [data] if container_of(data) is not None else []
        self._slots: list[Slot] = []
        self._is_open = True
        self.rebound: Rebound | None = None
        self.carried = Carried({}, (), ObjectValues())
        self._add(self._split())

    @property
    def roots(self) -> tuple[str, ...]:
        """Names of the namespace that lead to the slots."""
        return tuple(dict.fromkeys(slot.root for slot in self._slots))

    def shared(self) -> set[int]:
        """Return the identities of arrays in more than one slot of the user's objects."""
        counted: Counter[int] = Counter()
        for found in self._walk():
            for item in found.container.contents().values():
                if not is_data(item):
                    counted.update({id(leaf) for leaf in _own_arrays(item)})
        return {leaf for leaf, times in counted.items() if times > 1}

    def originals(self) -> dict[str, list[Any]]:
        """Return the leaves of the slots before the first step, for each name of the step."""
        found: dict[str, list[Any]] = {name: [] for name in sorted(self._lines)}
        for slot in self._slots:
            found[self._origin(slot)] += leaves_in(slot.original)
        return found

    def settle(self) -> None:
        """Refuse traces that rebind other slots from now on."""
        self._is_open = False

    @contextlib.contextmanager
    def tracing(self, values: dict[str, Any]) -> Iterator[Trace]:
        """Put values into the slots, by path, and restore the objects afterwards."""
        carried = {slot.place for slot in self._slots}
        trace = Trace(list(self._walk()), carried, self._refuse)
        try:
            for slot in self._slots:
                slot.put(values[slot.path])
            yield trace
        finally:
            trace.restore()

    def after(self, trace: Trace, changed: set[str]) -> dict[str, Any]:
        """Return the slots' values after a step, by path; empty if it rebound other slots.

        Args:
            trace: Trace of this step.
            changed: Names whose copies the step changed in place.

        Raises:
            StepError: A slot cannot be carried.
        """
        fresh = trace.rebound()
        whole = (changed | self._of_copies(fresh)) & self._copied
        if fresh or whole:
            if not self._is_open:
                slot = fresh[0] if fresh else None
                where = f"`{slot.path}`" if slot else f"`{min(whole)}`"
                raise StepError(
                    f"{where} is changed by the step for some batches only: change it for "
                    "batches of every shape, or for none"
                )
            self.rebound = Rebound(fresh, whole)
            return {}
        contents = {id(s.found.container.value): s.found.container.contents() for s in self._slots}
        return {slot.path: contents[slot.place[0]][slot.key] for slot in self._slots}

    def add(self, found: Rebound) -> None:
        """Carry the rebound slots in later traces; the objects contain their own values."""
        self.rebound = None
        self._copied -= found.whole
        self._add([*self._slots, *found.slots, *self._of_names(found.whole)])

    def restore(self) -> None:
        """Write the carried values to the user's objects."""
        finals = self.carried.finals()
        for slot in self._slots:
            slot.put(finals[slot.path])

    def _walk(self) -> Iterator[Found]:
        return walk(self._lines, self._namespace, self._apart)

    def _add(self, slots: Iterable[Slot]) -> None:
        """Carry these slots in later traces."""
        every = {slot.place: slot for slot in slots}
        inner = {
            id(part)
            for slot in every.values()
            for part in objects_in(slot.original)
            if id(part) not in slot.kept and container_of(part) is not None
        }
        self._slots = [slot for slot in every.values() if slot.place[0] not in inner]
        names = {slot.path: self._line(slot) for slot in self._slots}
        form = ObjectValues(tuple(slot.kept for slot in self._slots))
        self.carried = Carried(names, tuple(slot.original for slot in self._slots), form)

    def _split(self) -> list[Slot]:
        """Return the slots with arrays that are sharded over processes: JAX cannot embed them."""
        copies = self._containers(self._copied)
        return [
            Slot(found, key, item)
            for found in self._walk()
            if found.origin and id(found.container.value) not in copies
            for key, item in found.container.contents().items()
            if any(isinstance(leaf, jax.Array) and is_spread(leaf) for leaf in _own_arrays(item))
        ]

    def _of_names(self, names: set[str]) -> list[Slot]:
        """Return all slots with arrays in the values of these names."""
        containers = self._containers(names)
        return [
            Slot(found, key, item)
            for found in self._walk()
            if id(found.container.value) in containers
            for key, item in found.container.contents().items()
            if any(True for _ in _own_arrays(item))
        ]

    def _of_copies(self, slots: list[Slot]) -> set[str]:
        """Return the names that the step received as copies but changes directly."""
        return {
            name
            for name in self._copied
            for slot in slots
            if slot.path == name or slot.place[0] in self._containers({name})
        }

    def _containers(self, names: set[str]) -> set[int]:
        values = [self._namespace[name] for name in names]
        return {id(part) for value in values for part in objects_in(value)}

    def _origin(self, slot: Slot) -> str:
        for name in (slot.found.origin, slot.root):
            if name in self._lines:
                return name
        return next(iter(self._lines))

    def _line(self, slot: Slot) -> int:
        return self._lines[self._origin(slot)]

    def _refuse(self, slot: Slot, how: str) -> StepError:
        return StepError(f"`{slot.path}` (line {self._line(slot)}) {how}")


def _own_arrays(item: Any) -> Iterator[Any]:
    """Yield the arrays of a slot's value, except those in inner containers."""

    def has_slots(part: Any) -> bool:
        return container_of(part) is not None

    if is_array(item):
        yield item
    elif not is_data(item) or isinstance(item, tuple):
        leaves = jax.tree.leaves(item, is_leaf=has_slots)
        yield from (leaf for leaf in leaves if is_array(leaf))
