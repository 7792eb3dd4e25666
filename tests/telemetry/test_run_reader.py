"""Finding, listing and pruning of runs, their folder, and runs of ended writers."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.records import Writer
from nbdist.settings import Settings
from nbdist.telemetry import run_reader
from nbdist.telemetry.annotations import annotate
from nbdist.telemetry.run_reader import find, prune, search, stored_runs, whole_id
from nbdist.telemetry.run_writer import RUN_FILE, new_id
from nbdist.utils.processes import is_gone, this_process
from tests.runs import LOSS, new_run, new_state, read, reports, writing_process

if TYPE_CHECKING:
    from nbdist.telemetry.run_reader import StoredRun


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc", "20260101-000000-ABCDEF", "20260101-000000-abcdef\n", "a/b"]
)
def test_an_invalid_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a run id"):
        find(tmp_path, name)


def test_a_short_id_is_completed(tmp_path: Path) -> None:
    run = new_run(tmp_path).state
    assert whole_id(tmp_path, run.short_id) == run.id
    assert whole_id(tmp_path, run.id) == run.id
    assert whole_id(tmp_path, "*") == "*"


def test_a_missing_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run 20260101-000000-abcdef"):
        find(tmp_path, "20260101-000000-abcdef")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside = new_run(tmp_path / "outside")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / outside.state.id).symlink_to(outside.path)
    with pytest.raises(UsageError, match="no run"):
        find(tmp_path / "runs", outside.state.id)
    assert stored_runs(tmp_path / "runs") == ()


def test_the_folder_of_runs_may_be_a_link(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert find(tmp_path / "link", run.state.id).state() == run.state


def test_runs_are_listed_newest_first_and_others_skipped(tmp_path: Path) -> None:
    ids = [new_run(tmp_path, began=float(began)).state.id for began in (20, 10, 30)]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / new_id(0)).mkdir()
    broken = new_run(tmp_path)
    (broken.path / "run.json").write_text('{"id": 3}')
    assert [run.id for run in stored_runs(tmp_path)] == [ids[2], ids[0], ids[1]]
    assert stored_runs(tmp_path / "none") == ()


def test_the_oldest_ended_runs_are_pruned(tmp_path: Path) -> None:
    states = {10: "finished", 20: "running", 30: "failed", 40: "finished", 50: "running"}
    ids = {
        began: new_run(tmp_path, began=float(began), status=status).state.id
        for began, status in states.items()
    }
    assert prune(tmp_path, 0) == ()
    assert prune(tmp_path, 2) == (ids[30], ids[10])
    assert [run.id for run in stored_runs(tmp_path)] == [ids[50], ids[40], ids[20]]
    assert prune(tmp_path, 2) == ()


def other_version(root: Path, changed: float, **fields: object) -> str:
    """Write a run of another version, last changed at this time, and return its id."""
    content = {"version": 99, "status": "running", "writer": this_process()} | fields
    name = new_id(changed)
    (root / name).mkdir(parents=True)
    (root / name / RUN_FILE).write_bytes(msgspec.json.encode(content))
    os.utime(root / name / RUN_FILE, (changed, changed))
    return name


def test_ended_runs_that_cannot_be_read_are_pruned_too(tmp_path: Path) -> None:
    here = this_process()
    dead = msgspec.structs.replace(here, started=here.started - 10)
    gone = [
        other_version(tmp_path, 10.0, status="finished"),
        other_version(tmp_path, 11.0, writer=dead),
        other_version(tmp_path, 12.0, status="resting", writer=dead),
    ]
    kept = [
        other_version(tmp_path, 20.0),
        other_version(tmp_path, 21.0, status="resting"),
        other_version(tmp_path, 22.0, writer=Writer(host="elsewhere", pid=1, started=1.0)),
        other_version(tmp_path, 23.0, writer="renamed"),
        other_version(tmp_path, 50.0, status="finished"),
    ]
    damaged = new_run(tmp_path, began=5.0, status="finished")
    (damaged.path / RUN_FILE).write_bytes(b'{"id": "\xff"}')
    os.utime(damaged.path / RUN_FILE, (5.0, 5.0))
    readable = [new_run(tmp_path, began=b, status="finished").state.id for b in (30.0, 40.0)]
    assert prune(tmp_path, 2) == (readable[0], *reversed(gone))
    assert [run.id for run in stored_runs(tmp_path)] == [readable[1]]
    assert list(search(tmp_path).refused) == [*reversed(kept), damaged.state.id]


def test_a_spared_run_is_kept_whatever_its_age(tmp_path: Path) -> None:
    ids = [new_run(tmp_path, began=b, status="finished").state.id for b in (10.0, 20.0, 30.0, 40.0)]
    assert prune(tmp_path, 1, spared=ids[1]) == (ids[2], ids[0])
    assert [run.id for run in stored_runs(tmp_path)] == [ids[3], ids[1]]


def test_a_run_that_cannot_be_deleted_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may belong to another user."""
    ids = [new_run(tmp_path, began=b, status="finished").state.id for b in (10.0, 20.0, 30.0)]
    delete = shutil.rmtree

    def refuse(path: Path) -> None:
        if path.name == ids[1]:
            raise PermissionError(path)
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert prune(tmp_path, 1) == (ids[0],)
    assert [run.id for run in stored_runs(tmp_path)] == [ids[2], ids[1]]


def test_the_folder_of_runs_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NBDIST_RUNS_FOLDER")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert Settings.from_environment().runs_path == tmp_path / "nbdist" / "runs"
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", "~/1234")
    monkeypatch.setenv("NBDIST_KEPT_RUNS", "7")
    settings = Settings.from_environment()
    assert settings.runs_path == Path.home() / "1234"
    assert settings.kept_runs == 7


def test_a_negative_number_of_kept_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_KEPT_RUNS", "-1")
    with pytest.raises(UsageError, match="kept_runs"):
        Settings.from_environment()


def test_a_run_of_a_later_process_with_the_same_pid_is_lost(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    earlier = new_state().writer
    run.update(writer=type(earlier)(host=earlier.host, pid=earlier.pid, started=1.0))
    assert read(run).state().status == "lost"


def test_a_run_that_another_process_takes_over_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process writes its name after the reader has read that of the dead one."""
    run = new_run(tmp_path)
    own = run.state.writer
    for is_left in (lambda run: run.state().status == "lost", lambda run: run.has_ended()):
        run.update(writer=type(own)(host=own.host, pid=own.pid, started=1.0))
        assert is_left(read(run))

        def take_over(writer: Writer) -> bool:
            run.update(writer=own)
            return is_gone(writer)

        with monkeypatch.context() as patch:
            patch.setattr(run_reader, "is_gone", take_over)
            assert not is_left(read(run))


def test_a_run_on_another_host_is_assumed_to_be_running(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = run.state.writer
    run.update(writer=type(writer)(host="elsewhere", pid=2**30, started=1.0))
    assert read(run).state().status == "running"


def test_a_run_of_a_program_on_a_dead_host_is_lost(tmp_path: Path) -> None:
    writer = Writer(host="elsewhere", pid=2**30, started=1.0)
    run = new_run(tmp_path, writer=writer, program="train.py")
    assert read(run).state().status == "running"
    silent_since = time.time() - 600
    for path in (RUN_FILE, "tables"):
        os.utime(run.path / path, (silent_since, silent_since))
    state = read(run).state()
    assert (state.status, state.ended) == ("lost", pytest.approx(silent_since))
    assert read(run).has_ended()
    run.beat()
    assert read(run).state().status == "running"
    assert not read(run).has_ended()


WRITE_FOREVER = """
for number in range(10**9):
    run = new_run(root, number=number)
    print(run.state.id, flush=True)
    for step in range(1, 400, 5):
        run.take(losses(step, step + 4))
        if step % 25 == 1:
            run.flush()
            run.update(steps=step)
            run.take(rows([[0, 1, step, 0.5, 6, 7]], Columns(own=("a", str(step)))))
    run.update(status="finished")
    run.close()
"""


@pytest.mark.processes
@pytest.mark.parametrize("kills", [6, pytest.param(12, marks=pytest.mark.full)])
def test_a_run_killed_at_any_time_can_be_read(tmp_path: Path, kills: int) -> None:
    lost = 0
    for _ in range(kills):
        with writing_process(WRITE_FOREVER, tmp_path) as process:
            assert process.stdout
            process.stdout.readline()  # the process has created a run
            time.sleep(random.uniform(0, 0.05))
            process.kill()
        for path in tmp_path.glob("[!.]*"):
            lost += opened(find(tmp_path, path.name)) == "lost"
            shutil.rmtree(path)
    assert 0 < lost <= kills


def opened(run: StoredRun) -> str:
    """Read every file of a run and return its status."""
    state = run.state()
    assert state.status in ("finished", "lost")
    assert state.ended > 0 or state.status == "finished"
    for table, array in zip(run.tables(), reports(run), strict=True):
        if table.columns == LOSS:
            np.testing.assert_array_equal(array[:, 2], np.arange(1, len(array) + 1))
            np.testing.assert_array_equal(array[:, 4], array[:, 2])
    assert run.cells.startswith("# %%")
    return state.status


def test_pinned_runs_stay_and_do_not_count(tmp_path: Path) -> None:
    runs = [new_run(tmp_path, began=float(i), status="finished") for i in range(1, 5)]
    for run in runs:
        run.close()
    annotate(runs[0].path, {"pinned": True})
    annotate(runs[3].path, {"pinned": True})
    assert prune(tmp_path, 1) == (runs[1].state.id,)
    left = {run.id for run in stored_runs(tmp_path)}
    assert left == {runs[0].state.id, runs[2].state.id, runs[3].state.id}
