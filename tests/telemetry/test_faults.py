"""Runs that cannot be written: a full disk, a deleted folder, a killed writer."""

from __future__ import annotations

import os
import random
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.records import Columns, Metrics, Output
from nbdist.telemetry.run_reader import StoredRun, find
from nbdist.telemetry.run_writer import RunDirectory, new_id
from nbdist.telemetry.tables import MOST_TABLES
from tests.runs import (
    LOSS,
    largest_file,
    loss,
    losses,
    new_run,
    new_state,
    read,
    reports,
    rows,
    writing_process,
)

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 12


def test_a_full_disk_loses_rows_and_reports_their_number(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with largest_file(20_003):
        for step in range(1, 1001):
            run.take(losses(step, step))
        run.take(Output(rank=0, cell=1, stream="stdout", text="x" * 30_000))
        run.update(error="y" * 30_000)
        run.show("z" * 30_000)
        run.flush()
    assert "rows could not be stored" in run.fault
    assert "the run's state could not be written" in run.fault
    assert "cannot store all output of the cell" in run.fault
    assert "cannot store all text of the ranks" in run.fault
    assert all("too large" in fault for fault in run.fault.split("; "))
    assert (run.path / "shown.txt").stat().st_size <= 20_003
    (array,) = reports(read(run))
    assert len(array) == 20_003 // 40
    assert run.dropped == 1000 - len(array)
    assert read(run).state().error == ""  # the previous state remains
    run.take(losses(1001, 1003))
    run.close()
    (array,) = reports(read(run))
    np.testing.assert_array_equal(array[-3:, 2], [1001, 1002, 1003])
    assert len(array) + run.dropped == 1003


def test_a_run_that_cannot_be_created_leaves_no_files(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(OSError, match="too large"):
        RunDirectory.create(tmp_path, new_state(), "x" * 1001)
    assert list(tmp_path.iterdir()) == []


def test_a_run_deleted_while_it_is_written_counts_lost_rows(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.flush()
    shutil.rmtree(run.path)
    run.take(losses(2, 4))
    run.take(rows([[0, 1, 2, 0.1]], Columns()))
    run.take(Output(rank=0, cell=1, stream="stdout", text="lost"))
    run.flush()
    assert run.dropped == 4
    assert "4 rows could not be stored" in run.fault
    run.update(status="finished")
    assert "could not be written" in run.fault
    assert not run.stops_requested()
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_table_without_a_file_for_rows_is_not_written(tmp_path: Path) -> None:
    """A reader that knows its columns would use them for the rows of the next table."""
    run = new_run(tmp_path)
    in_the_way = run.path / "tables" / "0.f64"
    in_the_way.mkdir()
    run.take(loss(1))
    assert run.dropped == 1
    assert read(run).tables() == ()
    in_the_way.rmdir()
    run.take(rows([[0, 1, 2, 0.1]], Columns()))
    run.take(loss(3))
    run.close()
    assert [table.columns for table in read(run).tables()] == [Columns(), LOSS]
    assert [len(array) for array in reports(read(run))] == [1, 1]


KILLED_DURING_CREATION = """
import os, pathlib, signal
pathlib.Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
new_run(root)
"""


@pytest.mark.processes
def test_incomplete_new_runs_of_killed_processes_are_removed(
    tmp_path: Path,
) -> None:
    with writing_process(KILLED_DURING_CREATION, tmp_path) as process:
        process.wait(60)
    under_way = tmp_path / f".{new_id(1)}.new"
    abandoned = tmp_path / f".{new_id(2)}.new"
    for folder in (under_way, abandoned):
        folder.mkdir()
    hours_ago = time.time() - 2 * 3600
    os.utime(abandoned, (hours_ago, hours_ago))
    (tmp_path / ".notes.new").mkdir()
    os.utime(tmp_path / ".notes.new", (hours_ago, hours_ago))
    assert len(list(tmp_path.iterdir())) == 4
    run = new_run(tmp_path)
    assert set(tmp_path.iterdir()) == {under_way, tmp_path / ".notes.new", run.path}


def test_the_number_of_tables_is_limited(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in range(MOST_TABLES + 3):
        run.take(Metrics(rank=0, cell=1, epoch=1, step=step, time_s=0.0, own={f"loss{step}": 1.0}))
    run.close()
    assert len(read(run).tables()) == MOST_TABLES
    assert run.dropped == 3
    assert "report the same names" in run.fault


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
def test_a_run_killed_at_any_time_can_be_read(tmp_path: Path) -> None:
    lost = 0
    for _ in range(KILLS):
        with writing_process(WRITE_FOREVER, tmp_path) as process:
            assert process.stdout
            process.stdout.readline()  # the process has created a run
            time.sleep(random.uniform(0, 0.05))
            process.kill()
        for path in tmp_path.glob("[!.]*"):
            lost += opened(find(tmp_path, path.name)) == "lost"
            shutil.rmtree(path)
    assert 0 < lost <= KILLS


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


def test_a_run_of_a_later_process_with_the_same_pid_is_lost(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    earlier = new_state().writer
    run.update(writer=type(earlier)(host=earlier.host, pid=earlier.pid, started=1.0))
    assert read(run).state().status == "lost"


def test_a_run_on_another_host_is_assumed_to_be_running(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = run.state.writer
    run.update(writer=type(writer)(host="elsewhere", pid=2**30, started=1.0))
    assert read(run).state().status == "running"
