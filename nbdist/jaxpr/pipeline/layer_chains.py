"""Equal layers that a step applies one by one: chains of equal segments of equations.

In a flat step, such layers are equal segments in the forward pass, and again, in the opposite
order, in the backward pass. A segment reads results of the one before it, inputs of its own, such
as parameters, and values that all layers share. A segment of the backward pass also reads results
of the forward segment of its layer. Equations that do not depend on the batch, such as conversions
of parameters and keys of random draws, are not part of segments. They can run before all layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate, islice, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from nbdist.jaxpr.flatten import renamed, variables
from nbdist.jaxpr.pipeline.equation_kinds import Kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jax.extend.core import Jaxpr, Var

_MOST_PERIODS = 64
"""Most lengths of a layer, in equations, that are tried."""

_MOST_CHAINS = 8
"""Most repeated parts of a program that are tried as a pass."""

_MOST_STARTS = 6
"""Most positions within a layer that are tried as its first equation."""

_DRAWS = frozenset(("random_bits", "random_gamma", "rng_uniform", "threefry2x32"))
"""Primitives that draw random numbers, which may be rows: they stay in their layer."""


class Place(NamedTuple):
    """A result of a segment: the number of its equation, and its number among the results."""

    eqn: int
    out: int


class Chain(NamedTuple):
    """Equal segments, one after the other.

    Attributes:
        start: position of the first equation.
        length: equations of a segment.
        segments: number of segments.
        rest: equations after the last segment that are equal to the first ones of a segment.
    """

    start: int
    length: int
    segments: int
    rest: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length * self.segments

    def part(self, first: int, count: int) -> Chain:
        """Return some of the segments."""
        return Chain(self.start + first * self.length, self.length, count)


class Step:
    """A flat step, and its equations that depend on the batch.

    Attributes:
        whole: the program; equal equations that do not depend on the batch are merged.
        eqns: the equations that depend on the batch or draw random numbers, in order.
    """

    def __init__(self, jaxpr: Jaxpr, is_batch: Sequence[bool]) -> None:
        self.whole, self.eqns = _divided(jaxpr, is_batch)
        self._places = {
            var: Place(n, out)
            for n, eqn in enumerate(self.eqns)
            for out, var in enumerate(eqn.outvars)
        }
        reads = {
            (maker, user)
            for user, eqn in enumerate(self.eqns)
            for var in variables(eqn.invars)
            if (maker := self.maker(var)) >= 0
        }
        self._makers, self._users = np.array(sorted(reads), int).reshape(-1, 2).T

    def passes(self) -> Iterator[tuple[Chain, Chain]]:
        """Yield possible forward and backward passes of the same layers, longest first."""
        chains = islice(_chains(self.eqns), _MOST_CHAINS)
        shifted = [found for found in map(self._shifts, chains) if found]
        pairs = [pair for pair in product(shifted, shifted) if pair[0][0].start < pair[1][0].start]
        pairs.sort(key=lambda pair: -sum(one.segments * one.length for one, *_ in pair))
        for pair in pairs:
            for forward, backward in product(*pair):
                found = self._matched(forward, backward)
                if found is not None:
                    yield found

    def _shifts(self, chain: Chain) -> list[Chain]:
        """Return the chain from several first equations, fewest values between segments first."""
        start, length = chain.start, chain.length
        near = (self._makers >= start) & (self._makers < start + 2 * length)
        near &= self._users < start + 3 * length
        last: dict[int, int] = {}  # the last use of results of two segments, within a segment
        for maker, user in zip(self._makers[near] - start, self._users[near] - start, strict=True):
            last[int(maker)] = max(last.get(int(maker), 0), min(int(user), int(maker) + length))
        crossing = [0] * (3 * length + 1)
        for maker, user in last.items():
            crossing[maker + 1] += 1
            crossing[user + 1] -= 1
        found = []
        for shift, values in enumerate(islice(accumulate(crossing), length, 2 * length)):
            count = (length * chain.segments + chain.rest - shift) // length
            if values and count > 1:
                found.append((values, -count, Chain(start + shift, length, count)))
        return [one for *_, one in sorted(found)[:_MOST_STARTS]]

    def _matched(self, forward: Chain, backward: Chain) -> tuple[Chain, Chain] | None:
        """Return the forward and backward segments of the layers, or None.

        None means that the passes have no layers in common. The numbers of the two segments of a
        layer have the same sum for all layers.
        """
        read = (self._makers >= forward.start) & (self._makers < forward.end)
        read &= (self._users >= backward.start) & (self._users < backward.end)
        layers = (self._makers[read] - forward.start) // forward.length
        users = (self._users[read] - backward.start) // backward.length
        latest = np.full(backward.segments, -1)
        np.maximum.at(latest, users, layers)
        sums = set((latest + np.arange(backward.segments))[latest >= 0].tolist())
        if len(sums) != 1:
            return None
        (both,) = sums
        low, high = max(0, both - backward.segments + 1), min(forward.segments - 1, both)
        if high <= low:
            return None
        count = high - low + 1
        forward, backward = forward.part(low, count), backward.part(both - high, count)
        return (forward, backward) if forward.end <= backward.start else None

    def segment(self, chain: Chain, number: int) -> list[Any]:
        """Return the equations of a segment."""
        start = chain.start + number * chain.length
        return self.eqns[start : start + chain.length]

    def maker(self, var: Var) -> int:
        """Return the position of the equation of `eqns` that makes a variable; -1 if none does."""
        place = self._places.get(var)
        return -1 if place is None else place.eqn

    def place(self, var: Var, chain: Chain) -> tuple[int, Place] | None:
        """Return the segment that makes a value, and the place in it; None if none does."""
        place = self._places.get(var)
        if place is None or not chain.start <= place.eqn < chain.end:
            return None
        number, eqn = divmod(place.eqn - chain.start, chain.length)
        return number, Place(eqn, place.out)


def _divided(jaxpr: Jaxpr, is_batch: Sequence[bool]) -> tuple[Jaxpr, list[Any]]:
    """Return a program with merged equations, and those that depend on the batch or draw."""
    mixed = {var for var, is_row in zip(jaxpr.invars, is_batch, strict=True) if is_row}
    names: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    kinds = Kinds()
    eqns, own = [], []
    for eqn in jaxpr.eqns:
        now = eqn.replace(invars=renamed(eqn.invars, names))
        if eqn.primitive.name in _DRAWS or not mixed.isdisjoint(variables(now.invars)):
            mixed.update(now.outvars)
            own.append(now)
        else:
            given = tuple(None if isinstance(atom, Literal) else atom for atom in now.invars)
            before = known.setdefault((kinds.number(now), given), now)
            if before is not now:
                names.update(zip(now.outvars, before.outvars, strict=True))
                continue
        eqns.append(now)
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names)), own


def _chains(eqns: list[Any]) -> list[Chain]:
    """Return repeated parts of a program, longest first."""
    kinds = Kinds()
    numbers = np.array([kinds.number(eqn) for eqn in eqns])
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers.tolist()):
        places[number].append(place)
    steps = Counter(b - a for found in places.values() for a, b in pairwise(found))
    made = []
    for length, _ in steps.most_common(_MOST_PERIODS):
        same = np.concatenate(([False], numbers[:-length] == numbers[length:], [False]))
        starts, ends = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2).T
        made += [
            Chain(int(start), length, *divmod(int(end - start) + length, length))
            for start, end in zip(starts, ends, strict=True)
            if end - start >= length
        ]
    return sorted(made, key=lambda chain: (-chain.segments * chain.length, chain.length))
