"""Programs whose equal operations are priced once.

A layout prices an operation by its shapes and by properties of their dimensions: of the batch,
sharded over the model axis, and so on. Operations of equal layers differ only in the numbers of
their values and dimensions, so they form a class, and the first one is priced for all.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.graph.model import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    import numpy as np

    from nbdist.planner.graph.model import Value


class Classes(NamedTuple):
    """Classes of a program's operations, by which a layout treats them alike.

    Attributes:
        numbers: the class of each operation.
        firsts: the first operation of each class.
    """

    numbers: list[int]
    firsts: list[Op]


class Lifetimes(NamedTuple):
    """Values of a program that begin and end, in order of the events.

    Attributes:
        makers: position of the operation that makes the value of each event.
        places: number of the value among the operation's results.
        signs: 1 if the value begins, -1 if it ends.
        counts: number of events before the end of each operation, without the values that it frees.
    """

    makers: np.ndarray
    places: np.ndarray
    signs: np.ndarray
    counts: np.ndarray


class _Key(NamedTuple):
    """Key of an operation.

    Attributes:
        ins: numbers of the values that it reads, among the different values of the program.
        outs: numbers of the values that it makes.
        summed: groups that it sums over.
        rest: all else that prices depend on.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    summed: tuple[int, ...]
    rest: tuple[Hashable, ...]


class Program(tuple[Op, ...]):
    """Operations in order."""

    def __init__(self, _: Iterable[Op]) -> None:
        self._classes: dict[Hashable, Classes] = {}
        self._lifetimes: dict[frozenset[int], Lifetimes] = {}

    @cached_property
    def _known(self) -> tuple[list[int], list[_Key], list[Op], list[Value]]:
        """Numbers and keys of different operations, the first of each, and different values."""
        values: dict[Hashable, int] = {}
        shown: list[Value] = []

        def number(value: Value) -> int:
            key = value.groups, value.sizes, value.dtype, value.nbytes
            if key not in values:
                values[key] = len(shown)
                shown.append(value)
            return values[key]

        keys: dict[_Key, int] = {}
        firsts: list[Op] = []
        numbers = []
        for place, op in enumerate(self):
            if op.kind == "loop":
                key = _Key((), (), (), (place,))  # each loop is a class
            else:
                ins, outs = tuple(map(number, op.ins)), tuple(map(number, op.outs))
                is_twice = len({value.number for value in op.ins}) < len(ins)
                own = tuple([v.number for v in op.ins]) if is_twice else ()
                key = _Key(ins, outs, op.summed, (op.kind, op.flops, op.contract, own))
            if key not in keys:
                keys[key] = len(firsts)
                firsts.append(op)
            numbers.append(keys[key])
        return numbers, list(keys), firsts, shown

    @property
    def different(self) -> Classes:
        """Classes of operations with the same dimensions."""
        numbers, _, firsts, _ = self._known
        return Classes(numbers, firsts)

    def classes(
        self,
        layout: Hashable,
        value_key: Callable[[Value], Hashable],
        group_key: Callable[[int], Hashable],
    ) -> Classes:
        """Return the classes of operations that a layout treats alike.

        Args:
            layout: all that the keys depend on.
            value_key: returns a key of a value that layouts treat by its dimensions' properties.
            group_key: returns the properties of a dimension.
        """
        if layout not in self._classes:
            self._classes[layout] = self._classified(value_key, group_key)
        return self._classes[layout]

    def _classified(
        self, value_key: Callable[[Value], Hashable], group_key: Callable[[int], Hashable]
    ) -> Classes:
        numbers, keys, firsts, shown = self._known
        kinds: dict[Hashable, int] = {}
        kind = [kinds.setdefault(value_key(value), len(kinds)) for value in shown]
        found: dict[Hashable, int] = {}
        first: list[Op] = []
        of: list[int] = []
        for key, op in zip(keys, firsts, strict=True):
            own = (
                tuple([kind[n] for n in key.ins]),
                tuple([kind[n] for n in key.outs]),
                tuple([group_key(group) for group in key.summed]),
                key.rest,
            )
            if own not in found:
                found[own] = len(first)
                first.append(op)
            of.append(found[own])
        return Classes([of[number] for number in numbers], first)

    def lifetimes(self, free: Collection[int]) -> Lifetimes:
        """Return when values begin and end.

        Args:
            free: numbers of values that take no memory of their own.
        """
        key = frozenset(free)
        if key not in self._lifetimes:
            self._lifetimes[key] = self._lived(key)
        return self._lifetimes[key]

    def _lived(self, free: frozenset[int]) -> Lifetimes:
        import numpy as np

        last = {value.number: place for place, op in enumerate(self) for value in op.ins}
        ends: dict[int, list[tuple[int, int, int]]] = {}
        events: list[tuple[int, int, int]] = []
        counts = []
        for place, op in enumerate(self):
            for number, value in enumerate(op.outs):
                if value.number not in free:
                    events.append((place, number, 1))
                    end = last.get(value.number, place)
                    ends.setdefault(end, []).append((place, number, -1))
            counts.append(len(events))
            events += ends.pop(place, ())
        makers, places, signs = np.array(events, dtype=np.int64).reshape(-1, 3).T
        return Lifetimes(makers, places, signs, np.array(counts, dtype=np.int64))
