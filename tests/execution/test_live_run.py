"""Storage of a run in progress."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from nbdist.execution import live_run as module
from nbdist.execution.live_run import (
    FLUSH_INTERVAL_S,
    STATE_INTERVAL_S,
    NullRun,
    StoredLiveRun,
    begin,
    begun,
)
from nbdist.records import CellOptions, Device, Finding, StepOptions, StepProgram, WorkerState
from nbdist.settings import Settings
from tests.clock import Clock, replace_time
from tests.execution.doubles import request
from tests.runs import losses, new_run, new_state, read, recover, reports, rows, send

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.telemetry.run_writer import RunDirectory

PROGRAM = StepProgram(
    body="", given=("batch",), reads={}, carried=(), carried_lines={}, report="loss"
)
WORKERS = tuple(
    WorkerState(
        rank=rank,
        host="a",
        pid=10 + rank,
        versions={"python": "3.11", "tensorflow": "2.21", "jax": "0.10"},
        devices=(Device(platform="cpu", kind="cpu", name="cpu:0"),) * 2,
    )
    for rank in (0, 1)
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return replace_time(monkeypatch, module)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    created = new_run(tmp_path)
    yield created
    created.close()


@pytest.fixture
def live(directory: RunDirectory, clock: Clock) -> StoredLiveRun:
    del clock
    return StoredLiveRun(directory, 0)


def topics(directory: RunDirectory) -> dict[str, Finding]:
    return {finding.topic: finding for finding in read(directory).state().findings}


def test_records_are_written_after_an_interval(
    live: StoredLiveRun, directory: RunDirectory, clock: Clock
) -> None:
    live.tick()
    send(live, losses(1, 2))
    clock.now += FLUSH_INTERVAL_S / 2
    live.tick()
    assert sum(map(len, reports(read(directory)))) == 0
    clock.now += FLUSH_INTERVAL_S
    live.tick()
    (table,) = reports(read(directory))
    assert len(table) == 2


def test_the_state_is_written_after_an_interval(
    live: StoredLiveRun, directory: RunDirectory, clock: Clock
) -> None:
    live.tick()
    live.lost([1])
    clock.now += STATE_INTERVAL_S / 2
    live.tick()
    assert read(directory).state().workers[1].status == "running"
    clock.now += STATE_INTERVAL_S
    live.tick()
    assert [worker.status for worker in read(directory).state().workers] == ["running", "dead"]


def test_an_unchanged_state_is_not_written_again(
    live: StoredLiveRun, directory: RunDirectory, clock: Clock
) -> None:
    file = directory.path / "run.json"
    before = file.stat().st_ino
    for _ in range(3):
        clock.now += STATE_INTERVAL_S
        live.tick()
    assert file.stat().st_ino == before


def test_dropped_reports_are_a_finding_and_a_message(
    live: StoredLiveRun, directory: RunDirectory
) -> None:
    one = losses(1, 1)
    send(live, type(one)(rank=0, cell=1, columns=one.columns, values=one.values, dropped=1200))
    text = "1,200 reports were lost: the buffer of a rank was full"
    assert live.end("finished") == (text,)
    assert topics(directory)["dropped"] == Finding(topic="dropped", text=text, value=1200)


def test_reports_that_cannot_be_written_are_a_message(
    live: StoredLiveRun, directory: RunDirectory
) -> None:
    shutil.rmtree(directory.path)
    send(live, losses(1, 1))
    messages = live.end("finished")
    assert any("could not be stored" in message for message in messages)


def test_stop_requests_of_browsers_are_counted(
    live: StoredLiveRun, directory: RunDirectory
) -> None:
    assert live.stops_requested() == 0
    (directory.path / "stop").write_bytes(b"..")
    assert live.stops_requested() == 2
    live.stopping()
    assert read(directory).state().status == "stopping"


def test_a_recovery_holds_new_rows_until_it_ends(
    live: StoredLiveRun, directory: RunDirectory, clock: Clock
) -> None:
    send(live, losses(1, 4))
    live.recovering("rank 1 died")
    assert read(directory).state().recovering == "rank 1 died"
    assert len(reports(read(directory))[0]) == 4
    send(live, losses(3, 3, lost_s=2.0))
    clock.now += 1
    live.tick()
    assert len(reports(read(directory))[0]) == 4
    first, second = recover(4, 2, 1.0), recover(5, 4, 2.0)
    live.recovered(first, {0: 21, 1: 22})
    live.recovered(second, {0: 31})
    state = read(directory).state()
    assert (state.recovering, state.recoveries) == ("", (first, second))
    assert [(w.pid, w.status) for w in state.workers] == [(31, "running"), (22, "dead")]
    clock.now += 1
    live.tick()
    assert len(reports(read(directory))[0]) == 5


def test_a_run_that_was_recovering_is_kept(live: StoredLiveRun, directory: RunDirectory) -> None:
    live.recovering("rank 1 died")
    live.end("failed")
    live.close()
    assert read(directory).state().status == "failed"
    assert read(directory).state().recovering == ""


def test_the_end_is_stored(live: StoredLiveRun, directory: RunDirectory, clock: Clock) -> None:
    send(live, losses(1, 1))
    live.show("loss 1\n")
    assert live.end("failed", "ValueError on rank 0") == ()
    state = read(directory).state()
    assert (state.status, state.error, state.ended) == ("failed", "ValueError on rank 0", clock.now)
    live.show("Traceback\n")
    live.close()
    live.close()
    assert (directory.path / "shown.txt").read_text() == "loss 1\nTraceback\n"


def test_a_run_without_reports_is_discarded(live: StoredLiveRun, directory: RunDirectory) -> None:
    assert live.end("finished") == ()
    assert (live.state.id, live.state.status) == ("", "finished")
    live.close()
    assert not directory.path.exists()


def test_a_run_that_another_process_has_reported_is_kept(directory: RunDirectory) -> None:
    live = StoredLiveRun(directory, 0, reported=True)
    live.end("finished")
    live.close()
    assert read(directory).state().status == "finished"


def test_a_run_that_is_left_continues(live: StoredLiveRun, directory: RunDirectory) -> None:
    live.show("text")
    live.leave()
    live.close()
    assert read(directory).state().status == "running"
    assert (directory.path / "shown.txt").read_text() == "text"


def test_the_end_deletes_the_oldest_runs(tmp_path: Path, clock: Clock) -> None:
    old = [
        new_run(tmp_path, id=f"2026010{day}-000000-abcdef", status="finished", began=float(day))
        for day in (1, 2, 3)
    ]
    live = StoredLiveRun(new_run(tmp_path), 2)
    send(live, losses(1, 1))
    assert live.end("finished") == ("removed 2 old runs, keeping 2 (the setting NBDIST_KEPT_RUNS)",)
    assert [run.path.exists() for run in old] == [False, False, True]


def test_removed_runs_are_reported_once_in_a_session(tmp_path: Path, clock: Clock) -> None:
    messages = []
    for day in (1, 2, 3):
        new_run(tmp_path, id=f"2026010{day}-000000-abcdef", status="finished", began=float(day))
        live = StoredLiveRun(new_run(tmp_path, id=f"2026020{day}-000000-abcdef"), 1)
        send(live, losses(1, 1))
        messages += live.end("finished")
    assert len(messages) == 1
    assert "removed 1 old run" in messages[0]


def test_the_end_keeps_its_own_run(tmp_path: Path, clock: Clock) -> None:
    """A changed clock makes it look old."""
    newer = new_run(tmp_path, status="finished", began=9e9)
    directory = new_run(tmp_path, began=1.0)
    live = StoredLiveRun(directory, 1)
    send(live, losses(1, 1))
    assert live.end("finished") == ()
    assert directory.path.exists()
    assert newer.path.exists()


def test_a_run_without_reports_deletes_no_other_run(tmp_path: Path, clock: Clock) -> None:
    old = [new_run(tmp_path, status="finished", began=float(began)) for began in (1, 2)]
    live = StoredLiveRun(new_run(tmp_path), 1)
    assert live.end("finished") == ()
    live.close()
    assert all(run.path.exists() for run in old)


def test_a_traced_step_stores_its_trace_in_the_run(
    live: StoredLiveRun, directory: RunDirectory
) -> None:
    def step(profile: int) -> str:
        options = CellOptions(step=StepOptions(data="rows", profile=profile))
        placed = live.placed(request(options=options, program=PROGRAM))
        assert placed.step is not None
        return placed.step.options.profile_folder

    assert step(3) == str(directory.path / "events")
    assert step(0) == ""
    plain = request()
    assert live.placed(plain) is plain


def test_a_run_that_is_not_stored_explains_it_if_there_were_reports() -> None:
    run = NullRun("telemetry is off", new_state(id=""))
    assert run.end("finished") == ()
    send(run, losses(1, 1))
    assert run.end("failed", "an error") == ("telemetry is off",)
    assert run.state is not None
    assert (run.state.status, run.state.error) == ("failed", "an error")
    assert run.state.ended >= run.state.began


def begin_in(root: Path, **settings: object) -> object:
    given = Settings(runs_folder=str(root), **settings)  # type: ignore[arg-type]
    one = request(strategy="pjrt", options=CellOptions(seed=3))
    return begin(one, "%%dist_run", ["# one", "# two"], WORKERS, given, seed=9)


def test_a_begun_run_describes_its_workers(tmp_path: Path) -> None:
    live = begin_in(tmp_path)
    assert isinstance(live, StoredLiveRun)
    (path,) = tmp_path.iterdir()
    assert path.name == live.id
    assert (path / "cells.py").read_text() == "# one\n\n# two"
    state = live._directory.state
    assert state.hyperparameters == {"--seed": 3}
    assert state.notebook == ""
    assert state.framework == "jax 0.10, tensorflow 2.21"
    assert [(w.rank, w.pid, w.devices) for w in state.workers] == [
        (0, 10, "2 x cpu"),
        (1, 11, "2 x cpu"),
    ]
    assert (state.seed, state.cell_seed, state.stoppable) == (9, 3, False)


def test_a_run_without_telemetry_or_folder_is_not_stored(tmp_path: Path) -> None:
    off = begin_in(tmp_path, telemetry=False)
    assert isinstance(off, NullRun)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    refused = begin_in(tmp_path / "file")
    assert isinstance(refused, NullRun)
    send(refused, rows([[0, 1, 1, 0.1, 1.0]]))
    (message,) = refused.end("finished")
    assert message.startswith("this run is not stored: ")


def test_a_run_is_closed_after_its_cell(tmp_path: Path) -> None:
    settings = Settings(runs_folder=str(tmp_path))
    with begun(request(), "%%dist_run", [], WORKERS, settings) as live:
        assert len(list(tmp_path.iterdir())) == 1
        live.show("text")
    assert list(tmp_path.iterdir()) == []  # closed without reports
