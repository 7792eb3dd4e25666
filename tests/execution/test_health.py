"""Dead ranks, steps without progress, and collectives that cannot end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster import heartbeats
from nbdist.errors import CellError, RanksLostError
from nbdist.execution import cancellation, health
from nbdist.execution.context import RunContext
from nbdist.execution.failures import CellOutcome
from nbdist.execution.health import CollectiveDeadlocks, RankHealth
from nbdist.records import Beat, Diagnose, RunningCell, StatusQuery
from nbdist.settings import Settings
from tests.clock import Clock, replace_time
from tests.execution.doubles import (
    CELL,
    DispatcherDouble,
    EnginesDouble,
    LiveDouble,
    ViewDouble,
    ended,
    request,
    sender_to,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import RankPosition, StrategyName


class CancellationDouble:
    """Double of the cancellation: it stores calls and ends some ranks."""

    def __init__(self, running: set[int]) -> None:
        self.running = running
        self.ends: list[tuple[float, bool]] = []
        self.aborted: list[tuple[str, list[int]]] = []
        self.broken: set[str] = set()
        self.stuck: set[int] = set()
        self.slow: list[int] = []
        self.on_look: Callable[[], None] = lambda: None
        self.where: dict[int, RankPosition] = {}

    @property
    def positions(self) -> CancellationDouble:
        return self

    def receive(self, where: RankPosition) -> None:
        self.where[where.rank] = where

    def computing(self, *, on_any_thread: bool) -> list[int]:
        assert on_any_thread
        self.on_look()
        return self.slow

    def end(self, bound_s: float, *, at_once: bool = False) -> None:
        self.ends.append((bound_s, at_once))
        self.running.intersection_update(self.stuck)

    def abort_collectives(self, strategy: StrategyName, ranks: list[int]) -> None:
        self.aborted.append((strategy, ranks))
        self.broken.add(strategy)


class Watched:
    """Monitor of the health of some ranks on two hosts, with a simulated clock."""

    def __init__(self, clock: Clock, count: int = 2) -> None:
        self.clock = clock
        self.view, self.live = ViewDouble(), LiveDouble()
        self.engines = EnginesDouble()
        self.dispatcher = DispatcherDouble()
        self.sender = sender_to(range(count), self.dispatcher)
        host_of = {rank: "ab"[rank % 2] for rank in range(count)}
        self.outcome = CellOutcome(host_of)
        self.cancellation = CancellationDouble(self.sender.running)
        cell: Any = RunningCell(request=request(), ranks=tuple(host_of))
        unused: Any = None
        context = RunContext(cell, self.view, self.live, host_of, unused, unused, unused)
        self.on_show: Callable[[], None] = lambda: None
        self.settings = Settings()
        self.health = RankHealth(
            context,
            self.outcome,
            self.sender,
            self.cancellation,  # type: ignore[arg-type]
            self.engines,  # type: ignore[arg-type]
            self.settings,
            self._show,
        )

    def _show(self, seconds: float) -> None:
        self.clock.now += seconds
        self.on_show()

    def beat(self, rank: int, step: int) -> None:
        self.health.receive(Beat(rank=rank, cell=CELL, step=step, tested=0))

    def lost(self) -> RanksLostError:
        with pytest.raises(RanksLostError) as raised:
            self.health.check_alive()
        return raised.value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, health, cancellation, heartbeats)


@pytest.fixture
def watched(clock: Clock) -> Watched:
    return Watched(clock)


# Collectives.


class Waiting:
    """Ranks of which rank 0 has ended the cell, and rank 1 waits in a collective."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.dispatcher = DispatcherDouble()
        self.sender = sender_to([1], self.dispatcher)
        self.ended = {0: ended(0)}
        self.found = CollectiveDeadlocks(self.sender, [1, 0])
        self.fields: dict[int, dict[str, Any]] = {
            0: {"waits": False, "place": ""},
            1: {"waits": True, "collective": "pjrt"},
        }

    def answer(self, *ranks: int) -> None:
        """Let ranks report their position, with the clock of their hosts."""
        for rank in ranks or self.fields:
            self.found.receive(where(rank, clock_s=self.clock.now + 50, **self.fields[rank]))

    def deadlocked(self, seconds: float = 0.0) -> list[int]:
        self.clock.now += seconds
        self.answer()
        return sorted(self.found.deadlocked(self.ended))


@pytest.fixture
def waiting(clock: Clock) -> Waiting:
    return Waiting(clock)


def test_a_collective_without_the_other_ranks_is_a_deadlock(waiting: Waiting) -> None:
    assert waiting.deadlocked() == []
    assert waiting.deadlocked(1.7) == []
    assert waiting.deadlocked(0.15) == [1]


def test_positions_are_requested_of_all_ranks_four_times_a_second(waiting: Waiting) -> None:
    waiting.deadlocked()
    waiting.deadlocked(0.9)
    assert waiting.dispatcher.ranks(Diagnose) == []  # ranks rarely end at the same time
    waiting.deadlocked(0.1)
    waiting.deadlocked(0.2)
    command = Diagnose(number=CELL, waits=True)
    assert waiting.dispatcher.of(Diagnose) == [(command, 0), (command, 1)]
    waiting.deadlocked(0.06)
    assert waiting.dispatcher.ranks(Diagnose) == [0, 1, 0, 1]


def test_nothing_is_requested_before_a_rank_has_ended(waiting: Waiting) -> None:
    waiting.ended = {0: ended(0, "error")}
    waiting.deadlocked()
    assert waiting.deadlocked(2.0) == []
    waiting.ended = {0: ended(0)}
    waiting.sender.running.clear()
    assert waiting.deadlocked(2.0) == []
    assert waiting.dispatcher.sent == []


def test_answers_to_other_requests_are_ignored(waiting: Waiting) -> None:
    waiting.deadlocked()
    waiting.found.receive(where(1, place="elsewhere"))
    assert waiting.deadlocked(2.0) == [1]


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (0, {"cpu_s": 0.006}),
        (0, {"process_s": 0.3}),
        (1, {"step": 2}),
        (1, {"place": "line 3"}),
        (1, {"stack": "f"}),
        (1, {"collective": "mirrored"}),
        (1, {"under_way": True}),
    ],
)
def test_a_rank_that_does_something_restarts_the_wait(
    waiting: Waiting, rank: int, change: dict[str, Any]
) -> None:
    waiting.deadlocked()
    waiting.fields[rank] |= change
    assert waiting.deadlocked(2.0) == []
    waiting.fields[rank] |= {"under_way": False}
    waiting.deadlocked()
    assert waiting.deadlocked(1.9) == [1]


@pytest.mark.parametrize("change", [{"cpu_s": 0.004}, {"process_s": 0.2}])
def test_an_idle_process_may_use_a_little_time(waiting: Waiting, change: dict[str, Any]) -> None:
    waiting.deadlocked()
    waiting.fields[0] |= change
    assert waiting.deadlocked(1.9) == [1]


@pytest.mark.parametrize(("rank", "change"), [(0, {"under_way": True}), (1, {"collective": None})])
def test_a_rank_may_still_join(waiting: Waiting, rank: int, change: dict[str, Any]) -> None:
    waiting.fields[rank] |= change
    waiting.deadlocked()
    assert waiting.deadlocked(5.0) == []


def test_one_rank_outside_of_a_collective_may_join_the_others(waiting: Waiting) -> None:
    waiting.found = CollectiveDeadlocks(waiting.sender, [0, 1, 2])
    waiting.sender.running.add(2)
    waiting.fields[2] = {"waits": True, "collective": None}
    waiting.deadlocked()
    assert waiting.deadlocked(2.0) == []
    waiting.fields[2] = {"waits": True, "collective": "pjrt"}
    waiting.deadlocked()
    assert waiting.deadlocked(2.0) == [1, 2]


def test_old_answers_count_for_nothing(waiting: Waiting) -> None:
    waiting.deadlocked()
    waiting.clock.now += 2
    waiting.answer()
    waiting.clock.now += 1
    waiting.answer(1)
    assert waiting.found.deadlocked(waiting.ended) == {}
    waiting.answer()
    assert list(waiting.found.deadlocked(waiting.ended)) == [1]


def test_a_rank_that_never_answers_is_awaited(waiting: Waiting) -> None:
    waiting.answer(1)
    waiting.clock.now += 2
    waiting.answer(1)
    assert waiting.found.deadlocked(waiting.ended) == {}


def test_a_deadlock_ends_the_cell(watched: Watched, clock: Clock) -> None:
    watched.outcome.ended = {0: ended(0)}
    watched.sender.running.discard(0)
    watched.health.check_collectives()
    for _ in range(2):
        clock.now += 1.9
        watched.health.receive(where(0, clock_s=clock.now, place=""))
        watched.health.receive(where(1, clock_s=clock.now, waits=True, collective="mirrored"))
    with pytest.raises(CellError, match="rank 1@b: waits at line 2 in a collective") as raised:
        watched.health.check_collectives()
    assert raised.value.rank == 1
    assert raised.value.notes[-1].startswith("nbdist restores TensorFlow")
    assert watched.cancellation.aborted == [("mirrored", [1])]
    assert watched.cancellation.ends == [(watched.settings.interrupt_grace_s, True)]


# Deaths.


def test_a_dead_rank_ends_the_cell(watched: Watched) -> None:
    watched.health.check_alive()
    watched.beat(1, 3)
    watched.engines.lost = [1]
    lost = watched.lost()
    assert lost.ranks == (1,)
    assert str(lost) == (
        "rank 1@b was killed after step 3: run %dist_restart for new workers\n"
        "rank 1: last 5 lines of 1"
    )
    assert watched.live.calls == [("lost", [1])]
    assert watched.cancellation.ends == [(watched.settings.interrupt_grace_s, True)]


def test_ranks_that_do_not_end_after_a_death_are_lost_too(watched: Watched) -> None:
    watched.engines.lost, watched.cancellation.stuck = [1], {0}
    assert watched.lost().ranks == (0, 1)


def test_a_rank_that_died_after_its_end_is_not_lost(watched: Watched) -> None:
    watched.engines.lost = [1, 8]  # rank 8 does not run the cell
    watched.outcome.ended[1] = ended(1)
    watched.health.check_alive()


def test_the_last_records_of_a_preempted_rank_are_awaited(watched: Watched, clock: Clock) -> None:
    watched.engines.lost, watched.outcome.preempted = [1], {1}
    before = clock.now
    watched.on_show = lambda: watched.outcome.ended.update({1: ended(1)})
    watched.health.check_alive()
    assert clock.now > before
    watched.outcome.ended.clear()
    watched.on_show = lambda: None
    watched.lost()
    assert clock.now - before == pytest.approx(1.05, abs=0.11)


def test_a_death_without_a_preemption_is_reported_at_once(watched: Watched, clock: Clock) -> None:
    watched.engines.lost, watched.outcome.preempted = [1], {0}
    before = clock.now
    watched.lost()
    assert clock.now == before


# Progress.


def test_a_silent_rank_is_reported_once(watched: Watched, clock: Clock) -> None:
    clock.now += 6
    watched.beat(0, 0)
    watched.health.check_progress()
    watched.health.check_progress()
    assert watched.view.messages == [
        "rank 1@b does not respond in the cell; 1 may compute",
    ]
    assert watched.dispatcher.of(StatusQuery) == [(StatusQuery(number=CELL), 1)]


def test_an_unreachable_rank_is_not_asked(watched: Watched, clock: Clock) -> None:
    watched.engines.unreachable = {1}
    clock.now += 6
    watched.beat(0, 0)
    watched.health.check_progress()
    assert len(watched.view.messages) == 1
    assert watched.dispatcher.sent == []


def test_a_frozen_rank_ends_the_cell(watched: Watched, clock: Clock) -> None:
    watched.engines.frozen = {0, 1}
    watched.health.check_progress()
    watched.health.begin_steps()
    watched.beat(1, 4)
    clock.now += 6
    watched.beat(0, 0)
    watched.cancellation.stuck = {1}
    with pytest.raises(RanksLostError) as raised:
        watched.health.check_progress()
    assert raised.value.ranks == (1,)
    assert str(raised.value) == (
        "rank 1@b was stopped by a signal after step 4\nrank 1 is stuck: run %dist_restart"
    )
    assert watched.cancellation.ends == [(watched.settings.cell_grace_s, False)]


def stalled(watched: Watched, clock: Clock) -> None:
    watched.health.begin_steps()
    clock.now += 601
    for rank, step in ((0, 0), (1, 1)):
        watched.health.receive(where(rank, waits=bool(rank), step=step))


def test_steps_without_progress_end_the_cell(watched: Watched, clock: Clock) -> None:
    stalled(watched, clock)
    watched.sender.running.discard(0)
    watched.cancellation.where.pop(0)
    with pytest.raises(RanksLostError) as raised:
        watched.health.check_progress()
    assert str(raised.value) == (
        "no step for 601 s: all ranks wait in a collective of step 1\n"
        "if the ranks may wait longer between two steps: --hang-after SECONDS"
    )
    assert raised.value.ranks == ()


def test_computing_ranks_may_continue(watched: Watched, clock: Clock) -> None:
    stalled(watched, clock)
    watched.cancellation.slow = [0]
    watched.health.check_progress()
    (message,) = watched.view.messages
    assert message == (
        "no step for 601 s: rank 0@a is at line 2; the others wait in a collective of step 1, "
        "computing"
    )
    watched.health.check_progress()  # the wait begins again
    assert len(watched.view.messages) == 1


def test_a_rank_without_a_processor_for_one_look_may_continue(
    watched: Watched, clock: Clock
) -> None:
    stalled(watched, clock)
    looks = iter(([], [0]))

    def look() -> None:
        watched.cancellation.slow = next(looks)

    watched.cancellation.on_look = look
    watched.health.check_progress()
    assert watched.view.messages[0].endswith(", computing")


def test_ranks_that_end_or_step_during_the_look_do_not_hang(watched: Watched, clock: Clock) -> None:
    stalled(watched, clock)
    watched.cancellation.on_look = lambda: watched.beat(0, 2)
    watched.health.check_progress()
    clock.now += 601
    watched.cancellation.on_look = watched.sender.running.clear
    watched.health.check_progress()
    assert not any("no step" in message for message in watched.view.messages)
    assert watched.cancellation.ends == []


def test_the_last_step_in_words(watched: Watched) -> None:
    assert watched.health.after(0) == "in the cell"
    watched.health.begin_steps()
    assert watched.health.after(0) == "before its first step"
    watched.beat(0, 2)
    assert watched.health.after(0) == "after step 2"
    assert watched.health.after(1) == "before its first step"
