"""Comparison of the ranks' states at intervals during training.

A rank whose state has diverged spoils the averages of all ranks, and the loss does not show it.
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
    "Usual causes: a different seed on each rank, a condition on the rank, a value assigned from "
    "the rank's own samples without an average. Use --guard 0 to disable the comparison"
)


class Guard(Protocol):
    """Comparison of the ranks of one run."""

    def due(self, step: int) -> bool:
        """Return True if to compare the state after `step`; the same on all ranks."""
        ...

    def compare(self, step: int, state: Callable[[], State]) -> None:
        """Compare the state after `step`. All ranks must call it.

        Args:
            step: last step of this rank.
            state: returns the state; called the first time, then its result is reused.

        Raises:
            StepError: a rank differs from most ranks or, of two ranks, from rank 0. The first such
                rank raises it; the others raise AnotherRankError.
        """
        ...


class NoGuard:
    """A run without comparison."""

    def due(self, step: int) -> bool:
        del step
        return False

    def compare(self, step: int, state: Callable[[], State]) -> None: ...


class RankComparison:
    """A run whose ranks are compared after its first step, and then at a fixed interval.

    Args:
        every: interval in steps.
        rank: this rank.
        gather: gathers int32 numbers from all ranks; all ranks must call it.
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
        """Compare one digest of all values; compare each value only if those differ."""
        self._next = (step // self._every + 1) * self._every
        self._state = self._state or state()
        own = self._state.digests()
        numbers = np.array([each.number for each in own], np.int32)
        summary = np.array([step, len(own), of_array(numbers)], np.int32)
        steps, sizes, sums = self._gather(summary).T.tolist()
        self._check("number of steps", step, steps)
        self._check("number of variables", step, sizes)
        if len(set(sums)) > 1:
            self._report_first(step, own, self._gather(numbers))

    def _report_first(self, step: int, own: Sequence[Digest], of_all: np.ndarray) -> None:
        differing = np.flatnonzero((of_all != of_all[0]).any(axis=0))
        first = int(differing[0])
        beside = (
            f" (and {len(differing) - 1} more of {len(own)} differ)" if len(differing) > 1 else ""
        )
        self._check(f"`{own[first].name}`{beside}", step, of_all[:, first].tolist())

    def _check(self, what: str, step: int, numbers: Sequence[int]) -> None:
        """Raise the error of `compare` if the numbers of the ranks differ."""
        odd, usual = _parted(numbers)
        if not odd:
            return
        has = "rank {} has" if len(odd) == 1 else "ranks {} have"
        who = has.format(", ".join(map(str, odd)))
        text = f"{who} a different {what} than rank {usual} after step {step}. {_ADVICE}"
        raise StepError(text) if self._rank == odd[0] else AnotherRankError(text)


def guard_of(worker: Worker, gather: Callable[[], Gather]) -> Guard:
    """Return the guard of a run on all ranks, as the cell requests.

    Args:
        worker: this rank.
        gather: returns the gather function; called only if ranks are compared.
    """
    if worker.request.options.guard == 0 or worker.world_size == 1:
        return NoGuard()
    return RankComparison(worker.request.options.guard, worker.rank, gather())


def _parted(numbers: Sequence[int]) -> tuple[list[int], int]:
    """Return the ranks that differ from the majority, and the first rank of the majority.

    If two numbers are equally frequent, the one on the lower rank counts as right.
    """
    (most, _), *_ = Counter(numbers).most_common(1)  # a tie goes to the first one counted
    return [rank for rank, number in enumerate(numbers) if number != most], numbers.index(most)
