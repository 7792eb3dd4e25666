"""Assignment of jobs to places: new jobs, requeued jobs, cancellation and the stored commands."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from nbdist.cluster.schedulers import allocations
from nbdist.cluster.schedulers.allocations import Allocations
from nbdist.cluster.schedulers.jobs import SUBMITTED, Job
from nbdist.errors import StartError
from nbdist.records import Batch, DialInTicket, JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

RUNS = JobState(word="RUNNING")
WAITS = JobState(word="PENDING", waits=True)
OVER = JobState(word="FAILED", over=True)


class ScheduledJob(Job):
    """Double of a scheduler's job. A job is cancelled by its number.

    Attributes:
        submissions: jobs submitted so far.
        refusal: error of the next submission; empty if the scheduler accepts it.
        states: states that the queries return; the last one repeats.
        queries: number of queries.
    """

    title = "Job"
    submissions: ClassVar[list[ScheduledJob]] = []
    refusal: ClassVar[str] = ""

    def submit(self, ticket: Path) -> None:
        self.ticket = ticket
        self.states: list[JobState | str] = [RUNS]
        self.queries = 0
        if self.refusal:
            raise StartError(self.refusal)
        self._id = str(self.number)
        self.submissions.append(self)

    def state(self) -> JobState:
        self.queries += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, str):
            raise StartError(state)
        return state

    def ending(self) -> list[str]:
        return ["cancel", str(self.number)]


class Scheduler:
    """Allocations of places, with doubles of hosts and of a scheduler.

    Attributes:
        connected: places whose hosts are connected.
        cancelled: numbers of the cancelled jobs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connected: set[int] = set()
        self.cancelled: list[str] = []

    def cancel(self, commands: Sequence[Sequence[str]]) -> None:
        self.cancelled += [number for _, number in commands]

    def ticket(self, job: int) -> DialInTicket:
        return DialInTicket(address="a", port=1, key="k", trusted="t", cluster="c", job=job)

    def allocations(self) -> Allocations:
        batch = Batch(launcher="slurm")
        return Allocations(batch, self.folder, self.connected.__contains__, self.ticket)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    scheduler = Scheduler(tmp_path)
    monkeypatch.setitem(allocations._KINDS, "slurm", ScheduledJob)
    monkeypatch.setattr(allocations, "cancel", scheduler.cancel)
    monkeypatch.setattr(ScheduledJob, "submissions", [])
    monkeypatch.setattr(ScheduledJob, "refusal", "")
    return scheduler


class InstantLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps over every wait, so that no result depends on the machine."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()
        poll = self._selector.select

        def select(timeout: float | None) -> Any:
            self._now += timeout or 0.0
            return poll(None if timeout is None else 0)

        self._selector.select = select
        self.set_default_executor(InlineExecutor())

    def time(self) -> float:
        return self._now


class InlineExecutor(ThreadPoolExecutor):
    """Executor that calls functions at once, in the calling thread."""

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        return future


def run(scheduler: Scheduler, play: Callable[[Allocations], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(play(scheduler.allocations()))


# Reservations.


def test_one_job_is_submitted_for_all_places_without_hosts(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        scheduler.connected.add(2)
        assert await allocations.reserve([3, 0, 2]) == "Job 1"
        (job,) = ScheduledJob.submissions
        assert job.places == (0, 3)
        assert allocations.of([0, 1, 2, 3]) == {1: [0, 3]}
        assert allocations.named(1) == "Job 1"
        assert allocations.named(9) == "a job that was cancelled"

    run(scheduler, play)
    assert scheduler.cancelled == []


def test_no_job_is_submitted_if_all_hosts_are_connected(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        scheduler.connected.update((0, 1))
        assert await allocations.reserve([0, 1]) == ""

    run(scheduler, play)
    assert ScheduledJob.submissions == []
    assert list(scheduler.folder.iterdir()) == []


@pytest.mark.parametrize("successors", [False, True])
def test_a_job_that_will_provide_hosts_is_not_replaced(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, successors: bool
) -> None:
    monkeypatch.setattr(ScheduledJob, "has_successors", successors)

    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0, 1])
        ScheduledJob.submissions[0].states = [RUNS if successors else WAITS]
        assert await allocations.reserve([0, 1]) == ""

    run(scheduler, play)
    assert len(ScheduledJob.submissions) == 1


def test_a_job_that_is_over_is_replaced_and_cancelled(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0, 1])
        ScheduledJob.submissions[0].states = [OVER]
        assert await allocations.reserve([0, 1]) == "Job 2"
        assert allocations.of([0, 1]) == {2: [0, 1]}

    run(scheduler, play)
    assert scheduler.cancelled == ["1"]


def test_a_host_that_connects_meanwhile_needs_no_new_job(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        await allocations.reserve([1])
        ScheduledJob.submissions[0].states = [OVER]
        asyncio.get_running_loop().call_later(4.0, scheduler.connected.add, 0)
        assert await allocations.reserve([0, 1]) == "Job 3"  # after a wait for job 2
        assert ScheduledJob.submissions[2].places == (1,)

    run(scheduler, play)


def test_a_running_job_without_a_lost_host_is_replaced_there_only(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocations, "_BEGIN_AGAIN_S", 600.0)  # not waited for

    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0, 1])
        scheduler.connected.add(0)
        assert await allocations.reserve([0, 1]) == "Job 2"
        assert ScheduledJob.submissions[1].places == (1,)
        assert allocations.of([0, 1]) == {1: [0], 2: [1]}

    run(scheduler, play)
    assert scheduler.cancelled == []  # the first job still provides a host


def test_a_restarted_job_has_time_to_connect(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0, 1])
        asyncio.get_running_loop().call_later(4.0, scheduler.connected.update, (0, 1))
        assert await allocations.reserve([0, 1]) == ""
        scheduler.connected.clear()
        assert await allocations.reserve([0, 1]) == "Job 2"

    run(scheduler, play)


def test_a_refused_submission_restores_the_previous_job(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        ScheduledJob.submissions[0].states = [OVER]
        ScheduledJob.refusal = "invalid account"
        with pytest.raises(StartError, match="invalid account"):
            await allocations.reserve([0, 1])
        assert allocations.of([0, 1]) == {1: [0]}
        ScheduledJob.refusal = ""
        assert await allocations.reserve([0, 1]) == "Job 3"

    run(scheduler, play)
    assert scheduler.cancelled == ["2", "1"]  # the scheduler may have accepted the second job


def test_the_places_of_a_released_job_are_free_once_it_has_no_other_ones(
    scheduler: Scheduler,
) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0, 1])
        await allocations.release([1, 5])
        assert scheduler.cancelled == []
        await allocations.release([0])
        assert scheduler.cancelled == ["1"]
        assert allocations.of([0, 1]) == {}
        assert allocations.log_tail(1) == ""

    run(scheduler, play)


def test_the_end_cancels_all_jobs(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        await allocations.reserve([1])
        await allocations.end()

    run(scheduler, play)
    assert scheduler.cancelled == ["1", "2"]


def test_a_task_of_a_job_has_its_place_until_another_job_provides_it(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([4, 7])
        assert [allocations.place(1, task) for task in (0, 1, 2, -1)] == [4, 7, None, None]
        assert allocations.place(2, 0) is None
        scheduler.connected.add(4)
        await allocations.reserve([4, 7])
        assert (allocations.place(1, 0), allocations.place(1, 1)) == (4, None)
        assert allocations.place(2, 0) == 7

    run(scheduler, play)


# States.


def test_a_recent_state_is_not_queried_again(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        (job,) = ScheduledJob.submissions
        assert allocations.known(1) == SUBMITTED
        job.states = [WAITS, RUNS, OVER]
        assert [await allocations.query(1) for _ in range(2)] == [WAITS, WAITS]
        assert await allocations.query(1, afresh=True) == RUNS
        assert (allocations.known(1), job.queries) == (RUNS, 2)

    run(scheduler, play)


def test_the_last_state_remains_if_the_scheduler_does_not_respond(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        (job,) = ScheduledJob.submissions
        job.states = ["server is down", RUNS, "server is down again"]
        seen = [await allocations.query(1, afresh=True) for _ in range(3)]
        assert seen == [
            msgspec.structs.replace(SUBMITTED, detail="server is down"),
            RUNS,
            msgspec.structs.replace(RUNS, detail="server is down again"),
        ]

    run(scheduler, play)


def test_a_cancelled_job_is_over(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        assert await allocations.query(1) == JobState(word="cancelled", over=True)

    run(scheduler, play)


@pytest.mark.parametrize(
    ("states", "is_requeued"),
    [
        ([WAITS], True),
        ([JobState(word="COMPLETING"), RUNS, WAITS], True),
        ([OVER], False),
        ([msgspec.structs.replace(OVER, restarts=1)], False),
        ([RUNS], False),
        ([JobState(word="COMPLETING")], False),
    ],
)
def test_a_job_is_requeued_if_it_waits_again(
    scheduler: Scheduler, states: list[JobState | str], is_requeued: bool
) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        ScheduledJob.submissions[0].states = states
        assert await allocations.will_be_requeued([0]) is is_requeued

    run(scheduler, play)


def test_each_restart_of_a_job_is_noticed_once(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        assert await allocations.will_be_requeued([0]) is False
        await allocations.reserve([0])
        job = ScheduledJob.submissions[0]
        for restarts, is_requeued in ((1, True), (1, False), (2, True)):
            job.states = [JobState(word="RUNNING", restarts=restarts)]
            assert await allocations.will_be_requeued([0]) is is_requeued

    run(scheduler, play)


# Files.


def test_only_this_user_can_read_the_ticket_of_a_job(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])

    run(scheduler, play)
    ticket = ScheduledJob.submissions[0].ticket
    assert ticket.name == "job-1.json"
    assert ticket.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(ticket.read_bytes(), type=DialInTicket) == scheduler.ticket(1)


def test_a_successor_cancels_the_jobs_and_continues_their_numbers(scheduler: Scheduler) -> None:
    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])
        await allocations.reserve([1])

    run(scheduler, play)
    assert scheduler.cancelled == []

    async def play_again(allocations: Allocations) -> None:
        assert scheduler.cancelled == ["1", "2"]
        assert await allocations.reserve([0]) == "Job 3"

    run(scheduler, play_again)


def test_the_command_that_cancels_a_job_is_stored_before_its_submission(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[object] = []

    def submit(_job: ScheduledJob, _ticket: Path) -> None:
        stored.append(json.loads((scheduler.folder / "jobs.json").read_text()))

    monkeypatch.setattr(ScheduledJob, "submit", submit)

    async def play(allocations: Allocations) -> None:
        await allocations.reserve([0])

    run(scheduler, play)
    assert stored == [{"last": 1, "commands": [["cancel", "1"]]}]
