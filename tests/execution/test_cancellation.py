"""Cancellation of a cell on simulated ranks, with a simulated clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.collectives import Collectives
from nbdist.execution import cancellation as module
from nbdist.execution.cancellation import Cancellation, Positions, StopRequests
from nbdist.records import (
    SOON,
    AbortCollectives,
    ClusterRequest,
    Command,
    Diagnose,
    ForceInterrupt,
    Host,
    RankPosition,
    StatusQuery,
    StopAfter,
)
from tests.clock import Clock, replace_time
from tests.execution.doubles import (
    CELL,
    DispatcherDouble,
    EnginesDouble,
    LiveDouble,
    sender_to,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.records import StrategyName


class Ranks:
    """Double of ranks that run one cell, and of the loop that shows their records.

    Args:
        clock: advances by the time for which records are shown.
        count: the number of ranks.
        strategy: the strategy of the cell.

    Attributes:
        where: the position that each rank reports. A rank without one does not respond.
        busy: the ranks whose main thread computes all the time.
    """

    def __init__(self, clock: Clock, count: int, strategy: StrategyName | None = None) -> None:
        self.clock = clock
        self.where: dict[int, RankPosition] = {}
        self.busy: set[int] = set()
        self.dispatcher = DispatcherDouble()
        self.dispatcher.deliver = self._receive
        self.sender = sender_to(range(count), self.dispatcher)
        self.engines = EnginesDouble()
        cluster = ClusterRequest(hosts=(Host(),) * count, frameworks=("tensorflow", "jax"))
        self.collectives = Collectives(cluster, self.engines)  # type: ignore[arg-type]
        self.cancellation = Cancellation(
            self.sender,
            strategy,
            self.engines,  # type: ignore[arg-type]
            self.collectives,
            self.show,
        )
        self.on_show: Callable[[], None] = lambda: None
        self._answers: list[RankPosition] = []

    def _receive(self, command: Command, rank: int) -> None:
        if isinstance(command, Diagnose) and rank in self.where:
            cpu_s = self.clock.now if rank in self.busy else 0.0
            self._answers.append(where(rank, waits=self.where[rank].waits, cpu_s=cpu_s))
        if isinstance(command, AbortCollectives) and command.strategy in self.in_collective:
            self.in_collective = ""
            self.sender.running.discard(rank)

    in_collective = ""

    def show(self, seconds: float) -> None:
        self.clock.now += seconds
        for answer in self._answers:
            self.cancellation.positions.receive(answer)
        self._answers.clear()
        self.on_show()

    def end_on_interrupt(self, *ranks: int, after: int = 1) -> None:
        """Let ranks end at their interrupt number `after`."""

        def end(_ranks: Sequence[int]) -> None:
            if len(self.engines.interrupts) >= after:
                self.sender.running.difference_update(ranks)

        self.engines.on_interrupt = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


def test_positions_of_running_ranks_are_stored(clock: Clock) -> None:
    positions = Positions(sender_to([1], DispatcherDouble()), clock.sleep)
    positions.receive(where(0))
    positions.receive(where(1))
    assert positions.where == {1: where(1)}


def test_a_request_waits_until_all_ranks_respond(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    positions, before = ranks.cancellation.positions, clock.now
    ranks.where = {0: where(0), 1: where(1)}
    positions.request()
    assert ranks.dispatcher.of(Diagnose) == [(Diagnose(number=CELL), 0), (Diagnose(number=CELL), 1)]
    assert positions.where.keys() == {0, 1}
    assert clock.now - before == pytest.approx(module.POLL_S)
    del ranks.where[0]
    positions.request()
    assert positions.where.keys() == {1}
    assert clock.now - before == pytest.approx(module.POLL_S + 0.3, abs=module.POLL_S)


def test_ranks_that_use_the_processor_compute(clock: Clock) -> None:
    ranks = Ranks(clock, 4)
    ranks.where = {0: where(0), 1: where(1), 2: where(2, waits=True)}
    ranks.busy = {0, 2, 3}
    ranks.on_show = lambda: ranks.where.update({3: where(3)})  # too late for the first request
    assert ranks.cancellation.positions.computing() == [0]


def test_a_rank_that_uses_a_tenth_of_the_time_waits(clock: Clock) -> None:
    ranks = Ranks(clock, 1)
    ranks.where = {0: where(0)}
    used = iter((0.0, 0.05, 0.0, 0.051))

    def receive(command: Command, rank: int) -> None:
        if isinstance(command, Diagnose):
            ranks.cancellation.positions.receive(where(rank, cpu_s=next(used)))

    ranks.dispatcher.deliver = receive
    assert ranks.cancellation.positions.computing(0.5) == []
    assert ranks.cancellation.positions.computing(0.5) == [0]


def test_threads_of_a_rank_that_waits_may_compute(clock: Clock) -> None:
    ranks = Ranks(clock, 1)
    ranks.where = {0: where(0)}
    used = iter((0.0, 0.11, 0.0, 0.11, 0.0, 0.1))

    def receive(command: Command, rank: int) -> None:
        if isinstance(command, Diagnose):
            answer = where(rank, waits=True, process_s=next(used))
            ranks.cancellation.positions.receive(answer)

    ranks.dispatcher.deliver = receive
    assert ranks.cancellation.positions.computing(0.5) == []
    assert ranks.cancellation.positions.computing(0.5, on_any_thread=True) == [0]
    assert ranks.cancellation.positions.computing(0.5, on_any_thread=True) == []


@pytest.mark.parametrize(("queued_s", "computing"), [(0.3, [0]), (0.2, [])])
def test_threads_that_wait_for_a_processor_compute(
    clock: Clock, queued_s: float, computing: list[int]
) -> None:
    """On a busy machine, threads that compute wait for a processor most of the time."""
    ranks = Ranks(clock, 1)
    ranks.where = {0: where(0)}
    queued = iter((5.0, 5.0 + queued_s))
    used = iter((1.0, 1.01))

    def receive(command: Command, rank: int) -> None:
        if isinstance(command, Diagnose):
            answer = where(rank, waits=True, process_s=next(used), queued_s=next(queued))
            ranks.cancellation.positions.receive(answer)

    ranks.dispatcher.deliver = receive
    assert ranks.cancellation.positions.computing(0.5, on_any_thread=True) == computing


def test_waiting_ranks_are_sorted(clock: Clock) -> None:
    ranks = Ranks(clock, 3)
    ranks.where = {2: where(2, waits=True), 0: where(0, waits=True), 1: where(1)}
    assert ranks.cancellation.positions.waiting() == [0, 2]
    ranks.sender.running.clear()
    ranks.dispatcher.sent.clear()
    assert ranks.cancellation.positions.waiting() == []
    assert ranks.dispatcher.sent == []


def test_interrupts_are_repeated_until_the_ranks_end(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.end_on_interrupt(0, 1, after=3)
    before = clock.now
    ranks.cancellation.interrupt(10.0)
    assert ranks.engines.interrupts == [[0, 1]] * 3
    assert clock.now - before == pytest.approx(0.55, abs=0.1)
    assert ranks.cancellation.interrupted
    assert not ranks.dispatcher.ranks(ForceInterrupt)


def test_an_interrupt_ends_at_its_limit_and_drops_dead_ranks(clock: Clock) -> None:
    ranks = Ranks(clock, 3)
    ranks.engines.lost = [1]
    ranks.cancellation.interrupt(0.2)
    assert ranks.engines.interrupts == [[0, 1, 2]]
    assert ranks.cancellation.running == {0, 2}
    ranks.sender.running.clear()
    ranks.cancellation.interrupt(1.0)
    assert len(ranks.engines.interrupts) == 1


def test_a_wait_ends_early(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    before = clock.now
    ranks.cancellation.wait(5.0, lambda: clock.now > before + 1)
    assert clock.now - before == pytest.approx(1.0, abs=0.1)
    ranks.engines.lost = [0, 1]
    ranks.cancellation.wait(5.0)
    assert clock.now - before == pytest.approx(1.05, abs=0.11)
    assert not ranks.cancellation.running


def test_idle_ranks_raise_no_error_of_their_own(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.where = {0: where(0), 1: where(1)}
    before = clock.now
    ranks.cancellation.wait_for_same()
    assert clock.now - before < 0.8


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_computing_or_silent_rank_may_raise_the_same_error(clock: Clock, is_silent: bool) -> None:
    ranks = Ranks(clock, 2)
    ranks.where = {0: where(0)} if is_silent else {0: where(0), 1: where(1)}
    ranks.busy = set() if is_silent else {1}
    before = clock.now
    ranks.cancellation.wait_for_same()
    assert 1.1 <= clock.now - before < 2.0


def test_a_rank_without_a_processor_for_one_look_may_raise_the_same_error(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.where = {0: where(0), 1: where(1)}
    before = clock.now

    def give_processor() -> None:
        if clock.now - before > 0.35:
            ranks.busy = {1}

    ranks.on_show = give_processor
    ranks.cancellation.wait_for_same()
    assert 1.1 <= clock.now - before < 2.0


def test_an_unreachable_host_is_awaited_until_it_is_back_or_lost(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.engines.unreachable = {0, 1}
    before = clock.now

    def change() -> None:
        if clock.now - before > 1:
            ranks.engines.lost = [0]
        if clock.now - before > 2:
            ranks.engines.unreachable = {0}

    ranks.on_show = change
    ranks.cancellation.await_reachable()
    assert clock.now - before == pytest.approx(2.0, abs=0.11)


def test_an_ended_cell_is_not_cancelled(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.engines.lost = [0, 1]
    ranks.cancellation.end(3.0)
    assert not ranks.engines.interrupts
    assert not ranks.dispatcher.sent


def test_interrupts_alone_end_ranks_that_respond(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.end_on_interrupt(0, 1)
    ranks.cancellation.end(3.0)
    assert ranks.dispatcher.of(ForceInterrupt) == [
        (ForceInterrupt(number=CELL), 0),
        (ForceInterrupt(number=CELL), 1),
    ]
    assert {type(command) for command, _ in ranks.dispatcher.sent} == {ForceInterrupt}
    assert not ranks.cancellation.broken


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("pjrt", ["pjrt", "mirrored"]),
        ("mirrored", ["mirrored", "pjrt"]),
        (None, ["mirrored", "pjrt"]),
    ],
)
def test_collectives_of_waiting_ranks_are_cancelled(
    clock: Clock, strategy: StrategyName | None, order: list[str]
) -> None:
    """Cancel those of the cell's strategy first, and only where a rank waits."""
    ranks = Ranks(clock, 2, strategy)
    ranks.where = {0: where(0), 1: where(1, waits=True)}
    ranks.cancellation.end(3.0)
    aborts = [(command.strategy, rank) for command, rank in ranks.dispatcher.of(AbortCollectives)]
    assert aborts[:2] == [(order[0], 1), (order[1], 1)]
    assert {rank for _, rank in aborts} == {1}
    assert set(ranks.cancellation.broken) == {"pjrt", "mirrored"}
    assert ranks.cancellation.running == {0, 1}


def test_a_rank_that_ends_saves_the_other_collectives(clock: Clock) -> None:
    ranks = Ranks(clock, 1, "pjrt")
    ranks.where, ranks.in_collective = {0: where(0, waits=True)}, "pjrt"
    ranks.cancellation.end(3.0)
    assert not ranks.cancellation.running
    assert set(ranks.cancellation.broken) == {"pjrt"}


def test_computing_ranks_keep_their_collectives(clock: Clock) -> None:
    ranks = Ranks(clock, 1, "pjrt")
    ranks.where = {0: where(0)}
    before = clock.now
    ranks.cancellation.end(3.0)
    assert not ranks.cancellation.broken
    assert ranks.dispatcher.ranks(StatusQuery)
    assert clock.now - before == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize(("at_once", "first_s"), [(False, 1.0), (True, 0.05)])
def test_the_first_third_is_for_interrupts(clock: Clock, at_once: bool, first_s: float) -> None:
    ranks = Ranks(clock, 1)
    before = clock.now
    asked_at: list[float] = []

    def receive(command: Command, _rank: int) -> None:
        if isinstance(command, StatusQuery):
            asked_at.append(clock.now - before)

    ranks.dispatcher.deliver = receive
    ranks.cancellation.end(3.0, at_once=at_once)
    assert asked_at[0] == pytest.approx(first_s, abs=0.06)


def test_dead_ranks_are_not_asked_for_their_end(clock: Clock) -> None:
    ranks = Ranks(clock, 3)
    ranks.engines.lost = [1]
    ranks.cancellation.request_ends()
    assert ranks.dispatcher.of(StatusQuery) == [
        (StatusQuery(number=CELL), 0),
        (StatusQuery(number=CELL), 2),
    ]


def test_a_second_interrupt_agrees_to_kill(clock: Clock) -> None:
    ranks = Ranks(clock, 3)
    ranks.sender.running.discard(1)
    lines: list[str] = []
    before = clock.now
    assert ranks.cancellation.may_kill(lines.append, lambda: clock.now > before + 1)
    assert lines == ["rank 0,2 does not respond to the interrupt: interrupt again to kill it"]
    assert clock.now - before < 2


def test_nothing_is_killed_without_a_second_interrupt(clock: Clock) -> None:
    ranks = Ranks(clock, 1)
    before = clock.now
    assert not ranks.cancellation.may_kill(list[str]().append, lambda: False)
    assert clock.now - before == pytest.approx(4.0, abs=0.1)
    ranks.engines.lost = [0]
    assert not ranks.cancellation.may_kill(
        list[str]().append, lambda: not ranks.cancellation.running
    )
    lines: list[str] = []
    assert not ranks.cancellation.may_kill(lines.append, lambda: True)
    assert lines == []


def stops(dispatcher: DispatcherDouble) -> list[tuple[int, int, int]]:
    """Return rank, step and limit of each command to stop."""
    return [(rank, command.step, command.limit) for command, rank in dispatcher.of(StopAfter)]


def requests(ranks: Ranks, *, is_step: bool = True) -> tuple[StopRequests, LiveDouble, list[str]]:
    live, lines = LiveDouble(), list[str]()
    found = StopRequests(ranks.sender, ranks.cancellation, live, lines.append, is_step=is_step)
    return found, live, lines


def test_a_request_stops_steps_at_their_end(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    found, live, lines = requests(ranks)
    assert not found.check()
    assert not found.under_way
    live.requests = 1
    assert found.has_new_request()
    assert found.check()
    assert found.under_way
    assert not found.has_new_request()
    assert stops(ranks.dispatcher) == [(0, SOON, 0), (1, SOON, 0)]
    assert ("stopping", None) in live.calls
    assert ranks.engines.interrupts
    assert lines == ["stopping at the end of a step; interrupt again to cancel the step"]


def test_ranks_that_end_at_once_need_no_message(clock: Clock) -> None:
    ranks = Ranks(clock, 2)
    ranks.end_on_interrupt(0, 1)
    found, live, lines = requests(ranks)
    live.requests = 1
    assert found.check()
    assert lines == []


def test_a_later_request_cancels_the_step(clock: Clock) -> None:
    ranks = Ranks(clock, 1)
    found, live, _ = requests(ranks)
    live.requests = 1
    found.check()  # it takes one second
    live.requests = 2
    assert not found.check()
    clock.now += 1.1
    live.requests = 3
    with pytest.raises(KeyboardInterrupt):
        found.check()
    assert found.count == 3
    assert len(stops(ranks.dispatcher)) == 1


def test_a_request_cancels_a_cell_without_steps(clock: Clock) -> None:
    ranks = Ranks(clock, 1)
    found, live, _ = requests(ranks, is_step=False)
    live.requests = 1
    with pytest.raises(KeyboardInterrupt):
        found.check()
    assert stops(ranks.dispatcher) == []
