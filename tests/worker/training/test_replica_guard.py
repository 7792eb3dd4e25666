"""Comparison of the states of four ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import AnotherRankError, StepError
from nbdist.worker.training.replica_guard import NoGuard, RankComparison, guard_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.checkpoint.saver import State

RANKS = 4


def jax_state(holder: Any) -> State:
    """Import JAX late: earlier tests check that the notebook's process does not load it."""
    from nbdist.worker.jax.arrays.checkpoint import JaxState

    return JaxState(holder, ())


class Facts:
    """State of a rank, as facts."""

    def __init__(self, **facts: object) -> None:
        self._facts = facts

    def saved(self) -> dict[str, object]:
        return {}

    def take(self, arrays: dict[str, np.ndarray]) -> None: ...

    def alike(self) -> Iterator[tuple[str, object]]:
        yield from ()

    def facts(self) -> dict[str, object]:
        return self._facts


def exceptions_by_rank(states: list[tuple[int, Facts]]) -> list[Exception | None]:
    """Return the exception that each rank raises for its step and facts, or None."""
    barrier = threading.Barrier(RANKS)
    rows: list[np.ndarray] = [np.zeros(0)] * RANKS
    raised: list[Exception | None] = [None] * RANKS

    def compare_on_rank(rank: int) -> None:
        def gather(numbers: np.ndarray) -> np.ndarray:
            rows[rank] = numbers
            barrier.wait(10)
            gathered = np.stack(rows)
            barrier.wait(10)
            return gathered

        step, facts = states[rank]
        try:
            RankComparison(100, rank, gather).compare(step, lambda: jax_state(facts))
        except StepError as error:
            raised[rank] = error

    threads = [threading.Thread(target=compare_on_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_equal_ranks_raise_nothing() -> None:
    assert exceptions_by_rank([(100, Facts(a=1, b="x"))] * RANKS) == [None] * RANKS


@pytest.mark.parametrize(
    ("states", "differing", "message"),
    [
        (
            [(8, Facts(a=1, b=2)), (8, Facts(a=1, b=3)), *[(8, Facts(a=1, b=2))] * 2],
            1,
            "rank 1 has a different `b` than rank 0 after step 8.",
        ),
        (
            [(8, Facts(a=2, b=3, c=1)), *[(8, Facts(a=1, b=2, c=1))] * 3],
            0,
            "rank 0 has a different `a` (and 1 more of 3 differ) than rank 1 after step 8.",
        ),
        (
            [(8, Facts(a=1)), (8, Facts(a=2)), (8, Facts(a=1)), (8, Facts(a=2))],
            1,
            "ranks 1, 3 have a different `a` than rank 0 after step 8.",
        ),
        (
            [(8, Facts(a=1)), (8, Facts(a=1)), (9, Facts(a=1)), (8, Facts(a=1))],
            2,
            "rank 2 has a different number of steps than rank 0 after step 9.",
        ),
        (
            [*[(8, Facts(a=1))] * 3, (8, Facts(a=1, b=1))],
            3,
            "rank 3 has a different number of variables than rank 0 after step 8.",
        ),
    ],
)
def test_rank_that_differs_from_most_is_named(
    states: list[tuple[int, Facts]], differing: int, message: str
) -> None:
    raised = exceptions_by_rank(states)
    assert {type(raised[rank]) for rank in range(RANKS) if rank != differing} == {AnotherRankError}
    assert type(raised[differing]) is StepError
    assert str(raised[differing]).startswith(message)


def test_ranks_are_compared_at_regular_steps() -> None:
    guard = RankComparison(10, 0, lambda numbers: numbers[None])
    due = []
    for step in range(31):
        if guard.due(step):
            due.append(step)
            guard.compare(step, lambda: jax_state(Facts(a=1)))
    assert due == [1, 10, 20, 30]


def test_ranks_are_compared_after_the_first_step_past_the_interval() -> None:
    """Several steps of one execution pass the step at which the comparison is due."""
    guard = RankComparison(10, 0, lambda numbers: numbers[None])
    guard.compare(8, lambda: jax_state(Facts(a=1)))
    assert [guard.due(step) for step in (8, 16, 24)] == [False, True, True]


@pytest.mark.parametrize(
    ("guard", "world_size", "steps"), [(0, 4, []), (5, 1, []), (5, 2, [1, 5, 10])]
)
def test_ranks_of_a_cell_are_compared_as_the_option_requests(
    guard: int, world_size: int, steps: list[int]
) -> None:
    """A cell with `--guard 0` and a single rank compare nothing, and gather nothing."""
    gathered: list[np.ndarray] = []

    def gather(numbers: np.ndarray) -> np.ndarray:
        gathered.append(numbers)
        return numbers[None]

    options = SimpleNamespace(guard=guard)
    worker: Any = SimpleNamespace(
        request=SimpleNamespace(options=options), world_size=world_size, rank=0
    )
    made = guard_of(worker, lambda: gather)
    assert isinstance(made, NoGuard if not steps else RankComparison)
    due = []
    for step in range(12):
        if made.due(step):
            due.append(step)
            made.compare(step, lambda: jax_state(Facts(a=1)))
    assert due == steps == [numbers[0] for numbers in gathered]
