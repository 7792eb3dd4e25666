from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.records import Columns, Display, Metrics, Output, Rows
from nbdist.settings import Settings
from nbdist.telemetry.kept import KeptRun, find, kept, prune
from nbdist.telemetry.rundir import RunDirectory, new_id
from nbdist.telemetry.tables import MOST_TABLES
from tests.runs import LOSS, largest_file, loss, losses, new_run, new_state, rows, writing_process

KILLS = 12


def reports(run: KeptRun) -> list[np.ndarray]:
    return [run.array(table) for table in run.tables()]


def read(run: RunDirectory) -> KeptRun:
    return find(run.path.parent, run.state.id)


# What is written is read.

names = st.lists(st.sampled_from("abcdef"), max_size=3, unique=True).map(tuple)
layouts = st.builds(Columns, measures=names, own=names, shared=names)


@st.composite
def messages(draw: st.DrawFn) -> list[Rows]:
    """Rows of a few layouts in any order; their values are any bits."""
    made = []
    for columns in draw(st.lists(st.sampled_from(draw(st.lists(layouts, min_size=1))), max_size=8)):
        size = 8 * len(columns.names) * draw(st.integers(0, 4))
        values = draw(st.binary(min_size=size, max_size=size))
        made.append(Rows(rank=0, cell=1, columns=columns, values=values))
    return made


@settings(max_examples=60)
@given(messages())
def test_rows_come_back_by_columns_in_their_order(sent: list[Rows]) -> None:
    with tempfile.TemporaryDirectory() as root:
        run = new_run(Path(root))
        for record in sent:
            run.take(record)
        run.close()
        came = {table.columns: read(run).rows(table, 0, 8 * 4) for table in read(run).tables()}
    expected: dict[Columns, bytes] = {}
    for record in sent:
        expected[record.columns] = expected.get(record.columns, b"") + record.values
    assert came == expected
    assert (run.fault, run.dropped) == ("", 0)


def test_reports_one_by_one_are_rows_of_the_same_table(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 2))
    run.take(loss(3))
    run.close()
    (table,) = read(run).tables()
    assert table.columns == LOSS
    np.testing.assert_array_equal(read(run).array(table)[:, [2, 4]], [[1, 1], [2, 2], [3, 3]])


def test_a_metric_that_comes_late_or_is_missing_has_a_table_of_its_own(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.take(Metrics(rank=0, cell=1, epoch=1, step=2, time_s=0.2, own={"loss": 2.0, "new": np.nan}))
    run.take(loss(2, rank=1))
    run.close()
    assert [array.shape for array in reports(read(run))] == [(2, 5), (1, 6)]


def test_rows_are_read_from_anywhere(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 10))
    run.close()
    (table,) = read(run).tables()
    part = np.frombuffer(read(run).rows(table, 3, 2)).reshape(2, -1)
    np.testing.assert_array_equal(part[:, 2], [4, 5])
    assert read(run).rows(table, 10, 5) == b""


def test_a_row_that_was_written_in_part_is_not_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(losses(1, 3))
    run.close()
    file = run.path / "tables" / "0.f64"
    os.truncate(file, file.stat().st_size - 1)
    assert [array.shape for array in reports(read(run))] == [(2, 5)]


def test_bytes_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(Rows(rank=0, cell=1, columns=LOSS, values=b"12345"))
    run.take(loss(1))
    run.close()
    assert run.dropped == 1
    assert "no whole rows" in run.fault
    assert [array.shape for array in reports(read(run))] == [(1, 5)]


def test_text_and_cells_are_kept(tmp_path: Path) -> None:
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


def test_only_the_user_may_look(tmp_path: Path) -> None:
    run = new_run(tmp_path / "deep" / "runs")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_a_run_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with pytest.raises(FileExistsError, match=run.state.id):
        RunDirectory.create(tmp_path, run.state, "")


def test_stop_is_asked_for_by_a_file(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not run.stops_requested()
    read(run).ask_to_stop()
    assert run.stops_requested()


def test_a_run_that_reported_nothing_goes_away(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.discard()
    assert list(tmp_path.iterdir()) == []
    run.take(loss(2))
    run.flush()
    assert list(tmp_path.iterdir()) == []


# What goes wrong.


def test_a_full_disk_loses_rows_and_says_how_many(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with largest_file(20_003):
        for step in range(1, 1001):
            run.take(losses(step, step))
        run.take(Output(rank=0, cell=1, stream="stdout", text="x" * 30_000))
        run.update(error="y" * 30_000)
        run.show("z" * 30_000)
        run.flush()
    assert "rows could not be kept" in run.fault
    assert "the run's state could not be written" in run.fault
    assert "not all that the cell shows could be kept" in run.fault
    assert "not all text of the ranks could be kept" in run.fault
    assert all("too large" in fault for fault in run.fault.split("; "))
    assert (run.path / "shown.txt").stat().st_size <= 20_003
    (array,) = reports(read(run))
    assert len(array) == 20_003 // 40
    assert run.dropped == 1000 - len(array)
    assert read(run).state().error == ""  # the state that was there stays
    run.take(losses(1001, 1003))
    run.close()
    (array,) = reports(read(run))
    np.testing.assert_array_equal(array[-3:, 2], [1001, 1002, 1003])
    assert len(array) + run.dropped == 1003


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(1000), pytest.raises(OSError, match="too large"):
        RunDirectory.create(tmp_path, new_state(), "x" * 1001)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_deleted_while_it_is_written(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(loss(1))
    run.flush()
    shutil.rmtree(run.path)
    run.take(losses(2, 4))
    run.take(rows([[0, 1, 2, 0.1]], Columns()))
    run.take(Output(rank=0, cell=1, stream="stdout", text="lost"))
    run.flush()
    assert run.dropped == 4
    assert "4 rows could not be kept" in run.fault
    run.update(status="finished")
    assert "could not be written" in run.fault
    assert not run.stops_requested()
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_table_whose_rows_have_no_file_is_none(tmp_path: Path) -> None:
    """A reader that had seen its columns would read the next table's rows as its own."""
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


KILLED_WHILE_IT_MAKES = """
import os, pathlib, signal
pathlib.Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
new_run(root)
"""


def test_what_a_process_left_that_was_killed_in_making_a_run_goes_with_the_next(
    tmp_path: Path,
) -> None:
    with writing_process(KILLED_WHILE_IT_MAKES, tmp_path) as process:
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


def test_a_metric_with_a_new_name_in_every_step(tmp_path: Path) -> None:
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


def test_a_run_that_is_killed_at_any_instant_opens(tmp_path: Path) -> None:
    lost = 0
    for _ in range(KILLS):
        with writing_process(WRITE_FOREVER, tmp_path) as process:
            assert process.stdout
            process.stdout.readline()  # it has begun
            time.sleep(random.uniform(0, 0.05))
            process.kill()
        for path in tmp_path.glob("[!.]*"):
            lost += opened(find(tmp_path, path.name)) == "lost"
            shutil.rmtree(path)
    assert 0 < lost <= KILLS


def opened(run: KeptRun) -> str:
    """The status of a run of which every file was read."""
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


def test_of_a_run_on_another_host_nobody_knows(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = run.state.writer
    run.update(writer=type(writer)(host="elsewhere", pid=2**30, started=1.0))
    assert read(run).state().status == "running"


# Finding runs.


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc", "20260101-000000-ABCDEF", "20260101-000000-abcdef\n", "a/b"]
)
def test_what_is_no_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no run's id"):
        find(tmp_path, name)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run 20260101-000000-abcdef"):
        find(tmp_path, "20260101-000000-abcdef")


def test_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    outside = new_run(tmp_path / "outside")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / outside.state.id).symlink_to(outside.path)
    with pytest.raises(UsageError, match="there is no run"):
        find(tmp_path / "runs", outside.state.id)
    assert kept(tmp_path / "runs") == ()


def test_runs_are_reached_through_a_root_that_is_a_link(tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert find(tmp_path / "link", run.state.id).state() == run.state


def test_newest_first_and_what_is_no_run_is_skipped(tmp_path: Path) -> None:
    made = [new_run(tmp_path, began=float(began)).state.id for began in (20, 10, 30)]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / new_id(0)).mkdir()
    broken = new_run(tmp_path)
    (broken.path / "run.json").write_text('{"id": 3}')
    assert [run.id for run in kept(tmp_path)] == [made[2], made[0], made[1]]
    assert kept(tmp_path / "none") == ()


def test_the_oldest_that_are_over_go(tmp_path: Path) -> None:
    states = {10: "finished", 20: "running", 30: "failed", 40: "finished", 50: "running"}
    ids = {
        began: new_run(tmp_path, began=float(began), status=status).state.id
        for began, status in states.items()
    }
    assert prune(tmp_path, 0) == ()
    assert prune(tmp_path, 2) == (ids[30], ids[10])
    assert [run.id for run in kept(tmp_path)] == [ids[50], ids[40], ids[20]]
    assert prune(tmp_path, 2) == ()


# Settings.


def test_where_runs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NBDIST_RUNS_FOLDER")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    assert Settings.from_environment().runs_path == tmp_path / "nbdist" / "runs"
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", "~/1234")
    monkeypatch.setenv("NBDIST_KEPT_RUNS", "7")
    settings = Settings.from_environment()
    assert settings.runs_path == Path.home() / "1234"
    assert settings.kept_runs == 7


def test_a_number_of_runs_below_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_KEPT_RUNS", "-1")
    with pytest.raises(UsageError, match="kept_runs"):
        Settings.from_environment()
