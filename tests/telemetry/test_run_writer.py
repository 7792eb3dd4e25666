"""Runs that are written and read again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.records import Columns, Display, Metrics, Output, Rows
from nbdist.telemetry.run_writer import RunDirectory
from tests.runs import LOSS, loss, losses, new_run, read, reports

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
