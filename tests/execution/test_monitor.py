"""Monitor of a cell on simulated ranks, from its start to its error."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster.collectives import Collectives
from nbdist.errors import CellError, LeftError, PreemptedError, RanksLostError, WorkerError
from nbdist.execution import cancellation
from nbdist.execution.context import RunContext
from nbdist.execution.monitor import CellMonitor
from nbdist.execution.recorder import Recorder
from nbdist.execution.resume import ResumedRun
from nbdist.records import (
    SOON,
    Beat,
    CellOptions,
    CellRequest,
    ClusterRequest,
    Command,
    Compiled,
    ForceInterrupt,
    Host,
    Opened,
    Output,
    Preempted,
    Replicated,
    RunningCell,
    Saving,
    StatusQuery,
    StepOptions,
    StepProgram,
    StopAfter,
    Stopping,
)
from nbdist.settings import Settings
from nbdist.telemetry.receiver import Repeats, Subscribers
from tests.execution.doubles import (
    CELL,
    DispatcherDouble,
    EnginesDouble,
    LiveDouble,
    ViewDouble,
    ended,
    failure,
    request,
)
from tests.runs import losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.records import AnyEvent

SETTINGS = Settings(cell_grace_s=0.1, interrupt_grace_s=0.1)
PROGRAM = StepProgram(
    body="", given=("batch",), reads={}, carried=(), carried_lines={}, report="loss"
)
STEP = request(strategy="pjrt", options=CellOptions(step=StepOptions(data="rows")), program=PROGRAM)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for ranks that do not respond."""
    for name in ("_SAME_AT_MOST_S", "_SAME_S", "_DIAGNOSE_S", "_STOP_S", "_AGAIN_S"):
        monkeypatch.setattr(cancellation, name, 0.05)


class Cell:
    """Two simulated ranks that run one cell, and its monitor.

    Args:
        one: the cell.
        answers: records of each rank after it receives the cell.

    Attributes:
        opened: the messages about checkpoints.
    """

    def __init__(
        self, one: CellRequest, answers: Mapping[int, Sequence[AnyEvent]] | None = None
    ) -> None:
        self.request, self.answers = one, answers or {}
        self.view, self.live = ViewDouble(), LiveDouble()
        self.engines, self.dispatcher = EnginesDouble(), DispatcherDouble()
        self.dispatcher.deliver = self.receive
        cluster = ClusterRequest(hosts=(Host(),) * 2, frameworks=("tensorflow", "jax"))
        self.collectives = Collectives(cluster, self.engines)  # type: ignore[arg-type]
        self.subscribers = Subscribers()
        self.opened: list[Opened] = []
        self.on_command: Callable[[Command, int], None] = lambda command, rank: None
        self.workers: Any = SimpleNamespace(
            engines=self.engines,
            collectives=self.collectives,
            dispatcher=self.dispatcher,
            receiver=self,
            maintain=lambda show: None,
        )
        self.recorder = Recorder(CELL, is_step=one.step is not None)
        recoveries: Any = SimpleNamespace(opened=self.opened.append)
        running = RunningCell(request=one, ranks=(0, 1))
        hosts = {0: "a", 1: "a"}
        context = RunContext(
            running, self.view, self.live, hosts, self.recorder, recoveries, Repeats()
        )
        self.monitor = CellMonitor(CELL, context, self.workers, SETTINGS)

    def receive(self, command: Command, rank: int) -> None:
        """Let a rank answer a command."""
        if isinstance(command, CellRequest):
            self.send(*self.answers.get(rank, ()))
        self.on_command(command, rank)

    def send(self, *records: AnyEvent) -> None:
        for record in records:
            self.subscribers.deliver(record)

    def interrupted(self, *ranks: int) -> None:
        """Let ranks end at their interrupt."""
        self.engines.on_interrupt = lambda _: self.send(
            *(ended(rank, "interrupted") for rank in ranks)
        )

    def follow(self) -> None:
        self.monitor.follow(self.request)

    def summary(self) -> Any:
        """Return the status and the error with which the run ends."""
        self.monitor.close_live()
        return self.live.calls.pop()[1]

    def error(self, kind: type[BaseException]) -> Any:
        with pytest.raises(kind) as raised:
            self.follow()
        return raised.value


def output(text: str, cell: int = CELL) -> Output:
    return Output(rank=0, cell=cell, stream="stdout", text=text)


def test_a_cell_ends_when_all_ranks_have_ended_it() -> None:
    cell = Cell(request(), {0: [output("a"), ended(0)], 1: [ended(1)]})
    cell.follow()
    assert cell.view.shown == [output("a")]
    assert cell.monitor.ends == {0: ended(0), 1: ended(1)}
    assert cell.monitor.close_live() == ()
    assert cell.monitor.interrupted() == []
    assert not cell.engines.interrupts


def test_records_of_other_cells_are_ignored() -> None:
    cell = Cell(request(), {0: [output("old", cell=1), ended(0)], 1: [ended(1)]})
    cell.follow()
    assert cell.view.shown == []


def test_records_after_the_end_are_dropped() -> None:
    cell = Cell(request(), {0: [ended(0)], 1: [ended(1)]})
    cell.follow()
    cell.send(output("late"))
    cell.monitor.leave()
    assert cell.view.shown == []


def test_the_first_error_ends_the_cell_on_the_other_ranks() -> None:
    cell = Cell(request(), {0: [], 1: [ended(1, "error", failure())]})
    cell.interrupted(0)
    error = cell.error(CellError)
    assert (error.rank, error.evalue) == (1, "bad")
    assert error.notes == ("rank 0: stopped",)
    assert cell.summary() == ("failed", "ValueError on rank 1@a: bad")


def test_the_cause_of_an_error_is_shown() -> None:
    consequence = ended(0, "error", failure("InternalError", "aborted", follows=True))
    cell = Cell(request(), {0: [consequence], 1: [ended(1, "error", failure("KeyError", "x"))]})
    assert cell.error(CellError).ename == "KeyError"


def test_values_that_differ_between_ranks_are_an_error() -> None:
    def digest(number: int) -> tuple[Replicated, ...]:
        return (Replicated(name="w", number=number, changed=True),)

    ends = {rank: [ended(rank, replicated=digest(rank))] for rank in (0, 1)}
    error = Cell(request(strategy="pjrt"), ends).error(CellError)
    assert (error.rank, error.ename) == (1, "StepError")


def test_a_dead_rank_ends_the_cell() -> None:
    cell = Cell(request(), {0: [], 1: []})
    cell.engines.lost = [1]
    cell.interrupted(0)
    error = cell.error(RanksLostError)
    assert error.ranks == (1,)
    assert cell.summary()[0] == "failed"
    assert ("lost", [1]) in cell.live.calls


def test_a_rank_that_does_not_end_after_an_error_is_noted() -> None:
    cell = Cell(request(), {0: [], 1: [ended(1, "error", failure())]})
    error = cell.error(CellError)
    assert error.notes == ("rank 0: still running, perhaps in a collective: run %dist_restart",)
    assert cell.monitor.running == {0}
    cell.interrupted(0)
    cell.monitor.end_again()
    assert cell.monitor.running == set()


def test_a_cell_that_cannot_be_sent_ends_on_the_ranks_that_run_it() -> None:
    cell = Cell(request(), {0: []})
    cell.dispatcher.unreachable = {1}
    cell.interrupted(0)
    assert str(cell.error(WorkerError)) == "rank 1 cannot be reached"
    assert cell.engines.interrupts == [[0]]


def test_an_interrupt_cancels_a_plain_cell() -> None:
    cell = Cell(request(), {0: [], 1: []})
    cell.interrupted(0, 1)
    cell.on_command = lambda command, rank: signal.raise_signal(signal.SIGINT)
    cell.error(KeyboardInterrupt)
    assert cell.dispatcher.of(StopAfter) == []
    assert cell.monitor.interrupted() == []
    assert cell.summary() == ("interrupted", "")


def test_an_interrupt_stops_steps_at_their_end() -> None:
    cell = Cell(STEP, {0: [], 1: []})

    def receive(command: Command, rank: int) -> None:
        if isinstance(command, CellRequest):
            signal.raise_signal(signal.SIGINT)
        elif isinstance(command, StopAfter) and command.step == SOON:
            cell.send(Stopping(rank=rank, cell=CELL, limit=3 + rank))
        elif isinstance(command, StopAfter):
            cell.send(ended(rank))

    cell.on_command = receive
    cell.error(KeyboardInterrupt)
    stops = [(rank, command.step) for command, rank in cell.dispatcher.of(StopAfter)]
    assert stops == [(0, SOON), (1, SOON), (0, 4), (1, 4)]
    assert cell.dispatcher.of(ForceInterrupt) == []
    assert cell.monitor.interrupted() == []


def test_ranks_that_do_not_end_their_step_are_killed() -> None:
    cell = Cell(STEP, {0: [], 1: []})

    def receive(command: Command, rank: int) -> None:
        if rank == 1 and isinstance(command, (CellRequest, StopAfter)):
            signal.raise_signal(signal.SIGINT)  # the second one cancels the step

    cell.on_command = receive
    cell.interrupted(1)
    cell.error(KeyboardInterrupt)
    assert cell.monitor.interrupted() == [0]
    assert cell.view.messages == []


@pytest.mark.parametrize("is_again", [False, True])
def test_ranks_of_a_plain_cell_are_killed_after_another_interrupt(is_again: bool) -> None:
    cell = Cell(request(), {0: [], 1: []})

    def receive(command: Command, rank: int) -> None:
        is_last = isinstance(command, StatusQuery) and is_again
        if rank == 1 and (isinstance(command, CellRequest) or is_last):
            signal.raise_signal(signal.SIGINT)

    cell.on_command = receive
    cell.error(KeyboardInterrupt)
    assert cell.monitor.interrupted() == ([0, 1] if is_again else [])
    assert "rank 0-1 does not respond to the interrupt" in cell.view.messages[0]


def test_a_browser_stops_steps() -> None:
    cell = Cell(STEP, {0: [], 1: []})
    cell.live.requests = 1
    cell.engines.on_interrupt = lambda _: cell.send(ended(0), ended(1))
    cell.follow()
    assert cell.summary() == ("stopped", "")


def test_a_preempted_rank_stops_all_ranks() -> None:
    saving = Saving(folder="/kept")
    given = CellOptions(step=StepOptions(data="rows"), saving=saving)
    cell = Cell(
        request(options=given, program=PROGRAM),
        {0: [Beat(rank=0, cell=CELL, step=5, tested=0)], 1: [Preempted(rank=1, cell=CELL)]},
    )
    cell.engines.on_interrupt = lambda _: cell.send(ended(0), ended(1))
    error = cell.error(PreemptedError)
    assert error.ranks == (1,)
    assert "rank 1@a received SIGTERM: the run stopped before its first step; use --resume" in str(
        error
    )
    assert cell.view.messages == ["rank 1 received SIGTERM: stopping all ranks at the same step"]
    assert cell.dispatcher.ranks(StopAfter) == [0, 1]


def test_another_error_precedes_a_preemption() -> None:
    cell = Cell(
        request(), {0: [Preempted(rank=0, cell=CELL), ended(0, "error", failure())], 1: [ended(1)]}
    )
    assert cell.error(CellError).rank == 0


def test_a_cell_continues_without_this_process() -> None:
    cell = Cell(request(), {0: [output("a")], 1: []})
    cell.engines.is_requested = True
    cell.error(LeftError)
    assert cell.monitor.running == {0, 1}
    cell.send(output("b"))
    cell.monitor.leave()
    assert cell.view.shown == [output("a"), output("b")]
    assert cell.view.messages == [str(LeftError())]
    assert cell.live.calls == [("leave", None)]
    assert not cell.engines.interrupts


def test_records_reach_the_result_and_not_all_of_them_the_view() -> None:
    opened = Opened(rank=0, cell=CELL, names=("w",))
    compiled = Compiled(rank=0, cell=CELL, arguments=1, temporaries=1, seconds=1.0)
    beat = Beat(rank=0, cell=CELL, step=1, tested=0)
    reported = losses(1, 2)
    moved = type(reported)(rank=0, cell=CELL, columns=reported.columns, values=reported.values)
    cell = Cell(STEP, {0: [opened, compiled, beat, moved, ended(0)], 1: [ended(1)]})
    cell.follow()
    assert cell.view.shown == [moved]
    assert cell.opened == [opened]
    run = cell.recorder.run()
    assert (run.reports, run.compiled) == ((moved,), compiled)


def test_output_of_cancelled_collectives_is_hidden() -> None:
    cell = Cell(request(strategy="pjrt"), {0: [output("noise"), ended(0)], 1: [ended(1)]})
    cell.collectives.broken.add("pjrt")
    cell.follow()
    assert cell.view.shown == []


def test_collectives_are_checked_after_an_error_only() -> None:
    fine = Cell(request(strategy="pjrt"), {0: [ended(0)], 1: [ended(1)]})
    fine.follow()
    assert fine.collectives.unchecked == set()
    ends = {rank: [ended(rank, "error", failure())] for rank in (0, 1)}
    failed = Cell(request(strategy="pjrt"), ends)
    failed.error(CellError)
    assert failed.collectives.unchecked == {"pjrt", "mirrored"}


@pytest.mark.parametrize("stopping", [False, True])
def test_another_process_resumes_the_cell(stopping: bool) -> None:
    cell = Cell(STEP)
    cell.live.requests = int(stopping)
    cell.monitor.expect(STEP, ResumedRun(cell.live, (losses(1, 2),)), [0, 1])

    def receive(command: Command, rank: int) -> None:
        if isinstance(command, StatusQuery):
            cell.send(ended(0), ended(1)) if rank and not stopping else None
        elif isinstance(command, StopAfter):
            cell.send(ended(rank))

    cell.on_command = receive
    cell.monitor.resume(STEP, stopping=stopping)
    assert cell.dispatcher.ranks(StatusQuery) == [0, 1]
    assert cell.summary()[0] == ("stopped" if stopping else "finished")
    assert cell.recorder.run().reports == (losses(1, 2),)
    assert cell.dispatcher.of(CellRequest) == []


def test_a_stop_that_another_process_requested_is_sent_once() -> None:
    cell = Cell(STEP)
    cell.live.requests = 1
    rounds: list[object] = []

    def end_later(_show: object) -> None:
        rounds.append(None)
        if len(rounds) == 2:
            cell.send(ended(0), ended(1))

    cell.workers.maintain = end_later
    cell.monitor.expect(STEP, ResumedRun(cell.live), [0, 1])
    cell.monitor.resume(STEP, stopping=True)
    assert cell.live.calls == [("stopping", None)]
    assert cell.dispatcher.ranks(StopAfter) == [0, 1]


def test_a_closed_monitor_receives_nothing() -> None:
    cell = Cell(request(), {0: [ended(0)], 1: [ended(1)]})
    cell.monitor.close()
    cell.send(ended(0), output("x"))
    assert cell.monitor.ends == {}
