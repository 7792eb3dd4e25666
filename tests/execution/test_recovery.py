"""Recovery of a run on simulated workers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cells.dependencies import CellNames, Entry, Needed
from nbdist.errors import RanksLostError, ReplayError, StartError, WorkerError
from nbdist.execution import recovery as module
from nbdist.execution.recorder import Recorder
from nbdist.execution.recovery import Recovery, RecoveryLog
from nbdist.execution.resume import ResumedRun
from nbdist.records import LostRanks, Opened, RecoveryRecord, RunningCell, Saving
from nbdist.worker.remote import transfer
from tests.clock import Clock, replace_time
from tests.execution.doubles import CELL, LiveDouble, ViewDouble, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.errors import NbdistError
    from nbdist.records import CellRequest, StrategyName

LOST = RanksLostError([1], "rank 1 died after step 7")


class HandoverDouble:
    """Double of the handover file, without a file."""

    def __init__(self, loss: LostRanks | None = None) -> None:
        self.loss = loss
        self.saved: list[tuple[str, ...]] = []

    @property
    def handover(self) -> HandoverDouble:
        return self

    def lose(self, loss: LostRanks) -> None:
        self.loss = loss

    def opened(self, names: tuple[str, ...]) -> None:
        self.saved.append(names)


class JournalDouble:
    """Double of the journal: it needs these entries."""

    def __init__(self, *entries: Entry, error: ReplayError | None = None) -> None:
        self.entries, self.error = list(entries), error

    def needed(self, *_arguments: object) -> Needed:
        if self.error is not None:
            raise self.error
        return Needed(self.entries, "")

    def describe_lost_names(self, _entries: Sequence[Entry]) -> str:
        return "without `x`, defined in [2]"

    def repeated(self, entries: Sequence[Entry]) -> None:
        assert entries is self.entries

    def generators(self, before: Entry) -> bytes:
        return b"states before" * (before in self.entries)


class WorkersDouble:
    """Double of the worker group, its engines, their places and the collectives.

    Attributes:
        errors: the error of each attempt to start workers; none after the last.
        dead_ranks: the ranks that die in each attempt.
        replacing: the error of a replacement by spares; None if it works.
        before_modules: the calls before modules were sent, and the ranks.
    """

    def __init__(self, places: int = 3) -> None:
        self.calls: list[Any] = []
        self.world_size = places
        self.numbers = tuple(range(10, 10 + places))
        self.can_replace_ranks = self.recover_in_place = True
        self.replacing: NbdistError | None = None
        self.errors: list[NbdistError] = []
        self.dead_ranks: list[int] = []
        self.limit_s: list[float] = []
        self.before_modules: list[Any] = []

    @property
    def engines(self) -> WorkersDouble:
        return self

    places = collectives = engines

    def can_replace(self, ranks: Sequence[int]) -> bool:
        return self.can_replace_ranks

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self.limit_s.append(seconds)
        yield

    def replace(self, ranks: Sequence[int]) -> str:
        self.calls.append(("replace", tuple(ranks)))
        if self.replacing is not None:
            raise self.replacing
        return ""

    def recover(self, _phases: object) -> None:
        self.calls.append("recover")

    def restart(
        self, _phases: object, places: Sequence[int], *, in_haste: bool, waits: bool
    ) -> None:
        self.calls.append(("restart", tuple(places), waits))
        if self.errors:
            raise self.errors.pop(0)

    def dead(self) -> list[int]:
        return self.dead_ranks

    def seed(self) -> None:
        self.calls.append("seed")

    def send(self, ranks: Sequence[int]) -> None:
        """Send the user's modules: note the ranks, and the calls before."""
        self.before_modules = [*self.calls, tuple(ranks)]

    def texts(self) -> dict[str, tuple[str, ...]]:
        return {}

    def apply(
        self, function: Callable[..., Any], payload: bytes, ranks: Sequence[int]
    ) -> list[bool]:
        assert function is transfer.put
        self.calls.append(("put", payload, ranks))
        return [False] * len(ranks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


@pytest.fixture
def workers() -> WorkersDouble:
    return WorkersDouble()


def recovery_of(
    workers: WorkersDouble,
    journal: JournalDouble | None = None,
    handover: HandoverDouble | None = None,
) -> Recovery:
    def run(request: CellRequest, ranks: Sequence[int]) -> None:
        workers.calls.append(("run", request.label, list(ranks)))

    group: Any = workers
    cells: Any = journal or JournalDouble()
    file: Any = handover or HandoverDouble()
    return Recovery(group, cells, file, group, run, 60.0)


def recover(
    workers: WorkersDouble,
    *,
    strategy: StrategyName = "pjrt",
    shrink: bool = False,
    lost: RanksLostError = LOST,
    handover: HandoverDouble | None = None,
) -> list[Any]:
    """Recover a run, and return the calls before the set-up runs again."""
    saving = Saving(folder="/kept", shrink=shrink)
    recovery_of(workers, handover=handover).recover(
        lost, request(strategy=strategy, saving=saving), ()
    )
    return workers.calls[: workers.calls.index("seed")]


def entry(label: int, ranks: tuple[int, ...] = (0, 1, 2), *names: str) -> Entry:
    return Entry("cell", CellNames(binds=names), ranks, request(label=label))


def restarts(count: int, *places: int, waits: bool = True) -> list[Any]:
    return [("restart", places or (10, 11, 12), waits)] * count


def test_spares_replace_lost_ranks_under_pjrt(workers: WorkersDouble) -> None:
    assert recover(workers) == [("replace", (1,)), "recover"]
    assert workers.limit_s == [10.0]


def test_all_engines_restart_under_mirrored(workers: WorkersDouble) -> None:
    assert recover(workers, strategy="mirrored") == restarts(1)


def test_all_engines_restart_without_spares(workers: WorkersDouble) -> None:
    workers.can_replace_ranks = False
    assert recover(workers) == restarts(1)


def test_all_engines_restart_after_many_replacements(workers: WorkersDouble) -> None:
    workers.recover_in_place = False
    assert recover(workers) == restarts(1)


def test_all_engines_restart_if_no_rank_is_lost(workers: WorkersDouble) -> None:
    assert recover(workers, lost=RanksLostError((), "`w` missing")) == restarts(1)


def test_all_engines_restart_if_a_replacement_fails(workers: WorkersDouble) -> None:
    workers.replacing = WorkerError("one more died")
    assert recover(workers) == [("replace", (1,)), *restarts(1)]


def test_all_engines_restart_after_an_interrupted_recovery(workers: WorkersDouble) -> None:
    handover = HandoverDouble(LostRanks(ranks=(0,), reason="before"))
    assert recover(workers, handover=handover) == restarts(1)
    assert handover.loss == LostRanks(ranks=(1,), reason="rank 1 died after step 7")


def test_a_recovery_that_cannot_repeat_its_inputs_changes_nothing(workers: WorkersDouble) -> None:
    journal, handover = JournalDouble(error=ReplayError("[1] failed")), HandoverDouble()
    recovery = recovery_of(workers, journal, handover)
    with pytest.raises(ReplayError):
        recovery.recover(LOST, request(), ())
    assert workers.calls == []
    assert handover.loss is None


def test_workers_that_die_are_started_again(workers: WorkersDouble, clock: Clock) -> None:
    workers.can_replace_ranks, workers.dead_ranks = False, [1]
    workers.errors = [StartError("died"), WorkerError("died")]
    before = clock.now
    assert recover(workers) == restarts(3)
    assert clock.now - before == 4.0


def test_a_failed_start_is_retried_for_a_time(workers: WorkersDouble, clock: Clock) -> None:
    workers.can_replace_ranks, workers.dead_ranks = False, [1]
    workers.errors = [StartError(f"died {number}") for number in range(100)]
    with pytest.raises(StartError, match="died 31"):
        recover(workers)
    assert workers.calls == restarts(32)  # every 2 s, for 60 s


def test_a_failed_start_without_a_dead_rank_is_not_retried(workers: WorkersDouble) -> None:
    workers.can_replace_ranks = False
    workers.errors = [StartError("no disk")]
    with pytest.raises(StartError, match="no disk"):
        recover(workers)


def test_workers_that_die_twice_are_left_out(workers: WorkersDouble, clock: Clock) -> None:
    workers.can_replace_ranks, workers.dead_ranks = False, [1]
    workers.errors = [StartError("died"), StartError("died")]
    before = clock.now
    calls = recover(workers, shrink=True)
    assert calls == [*restarts(2, waits=False), *restarts(1, 10, 12, waits=False)]
    assert clock.now == before


def test_the_last_workers_are_not_left_out(workers: WorkersDouble, clock: Clock) -> None:
    workers.can_replace_ranks, workers.dead_ranks = False, [0, 1, 2]
    workers.errors = [StartError("died")] * 2
    assert recover(workers, shrink=True) == restarts(3, waits=False)


def test_inputs_are_created_again_on_the_remaining_ranks(
    workers: WorkersDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.world_size = 2
    journal = JournalDouble(
        entry(1),
        Entry("push", CellNames(), (1, 2), payload=b"x"),
        entry(4, (2,)),
        entry(5, (0, 2)),
    )
    recovery_of(workers, journal).recover(LOST, request(strategy="mirrored"), ())
    assert workers.calls[1:] == [
        "seed",
        ("run", 1, [0, 1]),
        ("put", b"x", [1]),
        ("run", 5, [0]),
    ]
    assert workers.before_modules == [*workers.calls[:2], (0, 1)]  # before the cells
    out = capsys.readouterr().out
    assert "nbdist: rank 1 died after step 7; recovering" in out
    assert "[1] %dist_push [4] [5]" in out
    assert "nbdist: the run continues without `x`, defined in [2]" in out


def test_names_that_repeated_cells_bind_can_be_created_again(workers: WorkersDouble) -> None:
    recovery = recovery_of(workers, JournalDouble(entry(1, (0,), "a", "b"), entry(2, (0,), "c")))
    assert recovery.can_recreate(["a", "c"], request(), ())
    assert not recovery.can_recreate(["a", "d"], request(), ())
    refused = recovery_of(workers, JournalDouble(error=ReplayError("[1] failed")))
    assert not refused.can_recreate([], request(), ())


# Log of the recoveries of a run.


class Log:
    """Log of a run on `workers` ranks, with its sinks."""

    def __init__(self, most: int = 2, workers: int = 3) -> None:
        self.pids = {rank: 100 + rank for rank in range(workers)}
        self.recorder, self.live = Recorder(CELL, is_step=True), LiveDouble()
        self.view, self.handover = ViewDouble(), HandoverDouble()
        file: Any = self.handover
        self.log = RecoveryLog(self.recorder, self.live, self.view, file, most, lambda: self.pids)

    def opened(self, step: int, *names: str) -> None:
        self.log.opened(Opened(rank=0, cell=CELL, names=names, step=step))

    def recoveries(self) -> tuple[RecoveryRecord, ...]:
        return self.recorder.run().recoveries


def lost() -> RanksLostError:
    return RanksLostError([1], "rank 1 died")


def test_recoveries_within_an_hour_are_limited(clock: Clock) -> None:
    log = Log(most=2).log
    assert log.may_begin(lost())
    clock.now += 1800
    assert log.may_begin(lost())
    clock.now += 1799
    refused = lost()
    assert not log.may_begin(refused)
    assert refused.__notes__ == ["2 recoveries within an hour, the limit of --max-heals"]
    clock.now += 1801  # the refused one counts too
    assert log.may_begin(lost())


def test_a_limit_of_zero_forbids_recoveries_without_a_note(clock: Clock) -> None:
    refused = lost()
    assert not Log(most=0).log.may_begin(refused)
    assert not hasattr(refused, "__notes__")


def test_names_of_the_checkpoint_are_stored_when_they_change() -> None:
    log = Log()
    assert not log.log.has_opened
    log.opened(-1, "w", "key")
    log.opened(-1, "w", "key")
    log.opened(-1, "w")
    assert log.handover.saved == [("w", "key"), ("w",)]
    assert (log.log.saved, log.log.has_opened) == (("w",), True)
    assert log.recoveries() == ()


def test_the_first_rank_that_continues_ends_the_recovery(clock: Clock) -> None:
    log = Log()
    log.log.begin_steps()
    clock.now += 10
    assert log.log.may_begin(LOST)
    log.log.begin(LOST)
    clock.now += 3
    assert log.log.begin_steps() == 13
    clock.now += 1
    log.pids = {0: 7, 1: 8, 2: 9}
    log.opened(5)
    log.opened(5)
    reason = "rank 1 died after step 7"
    record = RecoveryRecord(time_s=13, ranks=(1,), reason=reason, step=5, lost_s=4)
    assert log.recoveries() == (record,)
    assert log.live.calls == [("recovering", reason), ("recovered", (record, log.pids))]
    assert log.view.messages == [f"recovering: {reason}"]
    assert log.view.shown == [record]


def test_a_run_without_a_checkpoint_continues_from_its_start(clock: Clock) -> None:
    log = Log()
    log.log.may_begin(lost())
    log.opened(-1)
    assert log.recoveries()[0].step == 0


def test_only_fewer_workers_are_recorded(clock: Clock) -> None:
    log = Log(most=9)
    for pids in ({0: 1, 1: 1}, {0: 2, 1: 2}, {0: 3}):
        log.pids = pids
        log.log.may_begin(lost())
        log.opened(1)
    assert [recovery.workers for recovery in log.recoveries()] == [2, 0, 1]


def test_another_process_continues_the_count(clock: Clock) -> None:
    log = Log(most=2)
    earlier = RecoveryRecord(time_s=5.0, ranks=(1,), reason="", step=1, lost_s=1.0)
    old = RecoveryRecord(time_s=1.0, ranks=(1,), reason="", step=1, lost_s=1.0)
    cell = RunningCell(request=request(), ranks=(0,), saved=("w",))
    resumed = ResumedRun(log.live, age_s=3603.0, recoveries=(old, earlier))
    log.log.take_over(cell, resumed)
    assert (log.log.saved, log.log.has_opened) == (("w",), True)
    assert log.log.begin_steps() == 3603.0
    assert log.log.may_begin(lost())  # `old` was more than an hour ago
    assert not log.log.may_begin(lost())


def test_a_cell_without_saved_names_has_no_checkpoint(clock: Clock) -> None:
    log = Log()
    log.log.take_over(RunningCell(request=request(), ranks=(0,)), ResumedRun(log.live))
    assert not log.log.has_opened
