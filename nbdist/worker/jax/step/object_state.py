"""State that a step keeps in Python objects: the slots that it rebinds, carried as leaves.

A step that assigns `self.params` would leave a tracer there, and train nothing. So the slots that
a trace rebinds are found, the objects are restored, and the step is traced again with tracers in
those slots. Whatever a trace does, the objects hold concrete values afterwards.
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
    """What a trace rebound and did not carry: the step is to be traced again.

    Attributes:
        whole: names of which the step changes the very objects, though it was given copies.
    """

    slots: list[Slot]
    whole: set[str]


class ObjectState:
    """The slots of the user's objects that a step rebinds.

    Attributes:
        carried: their values; empty until a trace has found some.
        rebound: what the last trace found; None if nothing.

    Args:
        namespace: the user's.
        lines: the names that the step uses, each with its first line.
        copied: those of them of whose values the step gets copies.
        data: what the batches are taken from; another thread may change it meanwhile.
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
        """The names of the namespace that lead to the slots."""
        return tuple(dict.fromkeys(slot.root for slot in self._slots))

    def shared(self) -> set[int]:
        """The identities of arrays that stand in more than one slot of the user's objects."""
        counted: Counter[int] = Counter()
        for found in self._walk():
            for item in found.container.contents().values():
                if not is_data(item):
                    counted.update({id(leaf) for leaf in _own_arrays(item)})
        return {leaf for leaf, times in counted.items() if times > 1}

    def originals(self) -> dict[str, list[Any]]:
        """The leaves of the slots before the first step, for each name that the step uses."""
        found: dict[str, list[Any]] = {name: [] for name in sorted(self._lines)}
        for slot in self._slots:
            found[self._origin(slot)] += leaves_in(slot.original)
        return found

    def settle(self) -> None:
        """From here on a trace that rebinds other slots is refused."""
        self._is_open = False

    @contextlib.contextmanager
    def tracing(self, values: dict[str, Any]) -> Iterator[Trace]:
        """Within it the slots hold these values, by path; afterwards those of before again."""
        carried = {slot.place for slot in self._slots}
        trace = Trace(list(self._walk()), carried, self._refuse)
        try:
            for slot in self._slots:
                slot.put(values[slot.path])
            yield trace
        finally:
            trace.restore()

    def after(self, trace: Trace, changed: set[str]) -> dict[str, Any]:
        """The slots' values after a step, by path; empty if it rebound others.

        Args:
            trace: of this step.
            changed: names of which the step has changed its copies in place.

        Raises:
            StepError: a slot cannot be carried.
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
        """Carry in the traces to come what was rebound; the objects hold their own values."""
        self.rebound = None
        self._copied -= found.whole
        self._add([*self._slots, *found.slots, *self._of_names(found.whole)])

    def restore(self) -> None:
        """Put what was carried into the user's objects."""
        finals = self.carried.finals()
        for slot in self._slots:
            slot.put(finals[slot.path])

    def _walk(self) -> Iterator[Found]:
        return walk(self._lines, self._namespace, self._apart)

    def _add(self, slots: Iterable[Slot]) -> None:
        """Carry these slots in the traces to come."""
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
        """Slots with arrays of which no process has all: JAX cannot make constants of those."""
        copies = self._containers(self._copied)
        return [
            Slot(found, key, item)
            for found in self._walk()
            if found.origin and id(found.container.value) not in copies
            for key, item in found.container.contents().items()
            if any(isinstance(leaf, jax.Array) and is_spread(leaf) for leaf in _own_arrays(item))
        ]

    def _of_names(self, names: set[str]) -> list[Slot]:
        """All slots with arrays in these names' own values."""
        containers = self._containers(names)
        return [
            Slot(found, key, item)
            for found in self._walk()
            if id(found.container.value) in containers
            for key, item in found.container.contents().items()
            if any(True for _ in _own_arrays(item))
        ]

    def _of_copies(self, slots: list[Slot]) -> set[str]:
        """The names of which the step has copies, and changes the very values too."""
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
    """The arrays of a slot's value, but for those in containers of their own."""

    def has_slots(part: Any) -> bool:
        return container_of(part) is not None

    if is_array(item):
        yield item
    elif not is_data(item) or isinstance(item, tuple):
        leaves = jax.tree.leaves(item, is_leaf=has_slots)
        yield from (leaf for leaf in leaves if is_array(leaf))
