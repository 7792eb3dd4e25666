"""Whether what all ranks should have alike is alike, now and then while they train.

A rank that has gone its own way spoils the averages of all, and the loss does not show it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nbdist.errors import AnotherRankError, StepError
from nbdist.worker.checkpoint.digest import of_array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.checkpoint.saver import State
    from nbdist.worker.runtime.context import Worker

    Gather = Callable[[np.ndarray], np.ndarray]

_ADVICE = (
    "Usual causes: a seed of the rank's own, a condition on the rank, a value that is assigned "
    "from the rank's own samples without being averaged. --guard 0 leaves the comparison out"
)


class Guard(Protocol):
    """Compares the ranks of one run."""

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be compared; the same on all ranks."""
        ...

    def compare(self, step: int, state: Callable[[], State]) -> None:
        """Compare the state after `step`; all ranks have to.

        Args:
            step: how far the rank is.
            state: what it has; asked for the first time, and then kept.

        Raises:
            StepError: a rank has something else than most, or, of two, than rank 0. It is raised
                on the first such rank, and as AnotherRankError on the others.
        """
        ...


class Unguarded:
    """A run whose ranks are not compared."""

    def due(self, step: int) -> bool:
        del step
        return False

    def compare(self, step: int, state: Callable[[], State]) -> None: ...


class Compared:
    """A run whose ranks are compared after its first step, and then every so many.

    Args:
        every: steps.
        rank: this one.
        gather: of int32 numbers, every rank's; all have to call it.
    """

    def __init__(self, every: int, rank: int, gather: Gather) -> None:
        self._every = every
        self._rank = rank
        self._gather = gather
        self._next = 0
        self._state: State | None = None

    def due(self, step: int) -> bool:
        return step >= max(1, self._next)

    def compare(self, step: int, state: Callable[[], State]) -> None:
        """One number stands for all: which value differs is asked for only if one does."""
        self._next = (step // self._every + 1) * self._every
        self._state = self._state or state()
        own = self._state.digests()
        numbers = np.array([each.number for each in own], np.int32)
        summary = np.array([step, len(own), of_array(numbers)], np.int32)
        steps, sizes, sums = self._gather(summary).T.tolist()
        self._check("number of steps", step, steps)
        self._check("number of variables", step, sizes)
        if len(set(sums)) > 1:
            self._tell_first(step, own, self._gather(numbers))

    def _tell_first(self, step: int, own: Sequence[Digest], of_all: np.ndarray) -> None:
        differing = np.flatnonzero((of_all != of_all[0]).any(axis=0))
        first = int(differing[0])
        beside = (
            f" (and {len(differing) - 1} more of {len(own)} differ)" if len(differing) > 1 else ""
        )
        self._check(f"`{own[first].name}`{beside}", step, of_all[:, first].tolist())

    def _check(self, what: str, step: int, numbers: Sequence[int]) -> None:
        """Raises StepError, as `compare` says, where ranks have other numbers."""
        odd, usual = _parted(numbers)
        if not odd:
            return
        has = "rank {} has" if len(odd) == 1 else "ranks {} have"
        who = has.format(", ".join(map(str, odd)))
        text = f"{who} another {what} than rank {usual} after step {step}. {_ADVICE}"
        raise StepError(text) if self._rank == odd[0] else AnotherRankError(text)


def guard_of(worker: Worker, gather: Callable[[], Gather]) -> Guard:
    """That of a run of all ranks, as its cell asks for.

    Args:
        worker: this rank.
        gather: makes what gathers; called only where there is something to compare.
    """
    if worker.request.options.guard == 0 or worker.world_size == 1:
        return Unguarded()
    return Compared(worker.request.options.guard, worker.rank, gather())


def _parted(numbers: Sequence[int]) -> tuple[list[int], int]:
    """The ranks that have another number than most, and the first that has most's.

    Where as many have the one as the other, rank 0's side, or the lower rank's, is taken as right.
    """
    (most, _), *_ = Counter(numbers).most_common(1)  # of as many, what was first counted
    return [rank for rank, number in enumerate(numbers) if number != most], numbers.index(most)
