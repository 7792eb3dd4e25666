"""Runs that are written and read again, also on a full disk and in a deleted folder."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.records import Columns, Display, Metrics, Output, Rows, SystemSample
from nbdist.telemetry.run_writer import EVENTS_FOLDER, RunDirectory, new_id
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

names = st.lists(st.sampled_from("abcdef"), max_size=3, unique=True).map(tuple)
layouts = st.builds(Columns, measures=names, own=names, shared=names)


@st.composite
def messages(draw: st.DrawFn) -> list[Rows]:
    """Draw rows of a few layouts in any order, with any bits as values."""
    drawn = []
    for columns in draw(st.lists(st.sampled_from(draw(st.lists(layouts, min_size=1))), max_size=8)):
        size = 8 * len(columns.names) * draw(st.integers(0, 4))
        values = draw(st.binary(min_size=size, max_size=size))
        drawn.append(Rows(rank=0, cell=1, columns=columns, values=values))
    return drawn


@settings(max_examples=60)
@given(messages())
def test_rows_are_read_by_columns_in_their_order(sent: list[Rows]) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = new_run(Path(root))
        for record in sent:
            run.take(record)
        run.close()
        read_rows = {table.columns: read(run).rows(table, 0, 8 * 4) for table in read(run).tables()}
    expected: dict[Columns, bytes] = {}
    for record in sent:
        expected[record.columns] = expected.get(record.columns, b"") + record.values
    assert read_rows == expected
    assert (run.fault, run.dropped) == ("", 0)


def test_single_reports_are_rows_of_the_same_table(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 2))
    run.take(loss(3))
    run.close()
    (table,) = read(run).tables()
    assert table.columns == LOSS
    np.testing.assert_array_equal(read(run).array(table)[:, [2, 4]], [[1, 1], [2, 2], [3, 3]])


def test_samples_of_the_host_have_their_own_table_and_no_events(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for time_s in (2.0, 4.0):
        run.take(SystemSample(rank=1, cell=1, time_s=time_s, values={"cpu_cores": time_s / 2}))
    run.close()
    (table,) = read(run).tables()
    assert table.columns == Columns(system=("cpu_cores",))
    assert not table.columns.counts(is_step=True)
    assert read(run).array(table).tolist() == [[1, -1, -1, 2, 1], [1, -1, -1, 4, 2]]
    assert not (run.path / EVENTS_FOLDER).exists()


def test_a_late_or_missing_metric_has_its_own_table(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.take(Metrics(rank=0, cell=1, epoch=1, step=2, time_s=0.2, own={"loss": 2.0, "new": np.nan}))
    run.take(loss(2, rank=1))
    run.close()
    assert [array.shape for array in reports(read(run))] == [(2, 5), (1, 6)]


def test_rows_are_read_from_any_position(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 10))
    run.close()
    (table,) = read(run).tables()
    part = np.frombuffer(read(run).rows(table, 3, 2)).reshape(2, -1)
    np.testing.assert_array_equal(part[:, 2], [4, 5])
    assert read(run).rows(table, 10, 5) == b""


def test_a_partly_written_row_is_not_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 3))
    run.close()
    file = run.path / "tables" / "0.f64"
    os.truncate(file, file.stat().st_size - 1)
    assert [array.shape for array in reports(read(run))] == [(2, 5)]


def test_bytes_that_are_not_rows_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(Rows(rank=0, cell=1, columns=LOSS, values=b"12345"))
    run.take(loss(1))
    run.close()
    assert run.dropped == 1
    assert "not a multiple of the row size" in run.fault
    assert [array.shape for array in reports(read(run))] == [(1, 5)]


def test_text_and_cells_are_stored(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(Output(rank=1, cell=1, stream="stdout", text="grüße\n"))
    run.take(Display(rank=1, cell=1, data={"text/plain": "42"}, metadata={}))
    run.flush()
    assert read(run).output(1) == "grüße\n42\n"
    run.close()
    assert read(run).output(0) == ""
    assert read(run).cells == "# %% [3] %%dist_run --data train\n"


def test_the_state_is_replaced_and_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert read(run).state() == run.state
    run.update(status="finished", ended=run.state.began + 2)
    assert read(run).state().status == "finished"
    assert read(run).state() == run.state


def test_only_the_user_can_read_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "deep" / "runs")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with pytest.raises(FileExistsError, match=run.state.id):
        RunDirectory.create(tmp_path, run.state, "")


def test_a_stop_is_requested_by_a_file(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not run.stops_requested()
    read(run).ask_to_stop()
    assert run.stops_requested()


def test_a_discarded_run_leaves_no_files(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.discard()
    assert list(tmp_path.iterdir()) == []
    run.take(loss(2))
    run.flush()
    assert list(tmp_path.iterdir()) == []


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
