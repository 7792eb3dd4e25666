"""Files of tables: buffered rows, new tables, and rows that cannot be written."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from nbdist.records import Columns, Metrics, Rows, Table
from nbdist.telemetry.tables import FLOAT_BYTES, RowsLostError, TableFiles, as_rows
from tests.runs import LOSS, largest_file, loss, losses, new_run, read, reports, rows

if TYPE_CHECKING:
    from pathlib import Path

ROW_BYTES = 5 * FLOAT_BYTES
BUFFER_BYTES = 1 << 16
MOST_TABLES = 256


def size(folder: Path, number: int = 0) -> int:
    return (folder / f"{number}.f64").stat().st_size


def test_a_single_report_has_its_own_values_before_the_shared_ones() -> None:
    report = Metrics(
        rank=3, cell=7, epoch=2, step=5, time_s=0.5, own={"b": 1.0, "a": 2.0}, shared={"c": 3.0}
    )
    table = as_rows(report)
    assert (table.rank, table.cell) == (3, 7)
    assert table.columns == Columns(own=("b", "a"), shared=("c",))
    assert struct.unpack("<7d", table.values) == (3.0, 2.0, 5.0, 0.5, 1.0, 2.0, 3.0)
    assert as_rows(table) is table


def test_rows_are_written_at_a_flush_or_when_there_are_many(tmp_path: Path) -> None:
    files = TableFiles(tmp_path)
    files.take(loss(1))
    assert size(tmp_path) == 0
    files.flush()
    assert size(tmp_path) == ROW_BYTES
    many = BUFFER_BYTES // ROW_BYTES
    files.take(losses(2, many + 1))
    assert size(tmp_path) == ROW_BYTES
    files.take(loss(many + 2))
    assert size(tmp_path) == (many + 2) * ROW_BYTES
    files.take(loss(many + 3))
    files.close()
    assert size(tmp_path) == (many + 3) * ROW_BYTES


def test_rows_continue_an_existing_table_after_an_incomplete_row(tmp_path: Path) -> None:
    first = TableFiles(tmp_path)
    first.take(losses(1, 2))
    first.close()
    with (tmp_path / "0.f64").open("ab") as file:
        file.write(b"half of a row")
    second = TableFiles(tmp_path, [Table(number=0, columns=LOSS)])
    second.take(loss(3))
    second.take(rows([[0, 1, 3, 0.1]], Columns()))
    second.close()
    written = struct.unpack("<15d", (tmp_path / "0.f64").read_bytes())
    assert written[2::5] == (1.0, 2.0, 3.0)
    assert size(tmp_path, 1) == 4 * FLOAT_BYTES


def test_bytes_that_are_no_rows_are_refused_without_a_trace(tmp_path: Path) -> None:
    files = TableFiles(tmp_path)
    files.take(loss(1))
    with pytest.raises(
        RowsLostError, match="41 bytes are not a multiple of the row size 40"
    ) as lost:
        files.take(Rows(rank=0, cell=1, columns=LOSS, values=bytes(41)))
    assert lost.value.rows == 1
    files.close()
    assert size(tmp_path) == ROW_BYTES


def test_a_flush_writes_the_other_tables_after_a_failure(tmp_path: Path) -> None:
    files = TableFiles(tmp_path)
    tables = [Columns(own=(name,)) for name in "abc"]
    for number, columns in enumerate(tables):
        files.take(rows([[0, 1, step, 0.1, 1.0] for step in range(number + 1)], columns))
    (tmp_path / "0.f64").unlink()
    (tmp_path / "1.f64").unlink()
    with pytest.raises(RowsLostError, match=r"1\.f64 was deleted") as lost:
        files.flush()
    assert lost.value.rows == 1 + 2
    assert size(tmp_path, 2) == 3 * ROW_BYTES
    files.close()  # it reports no lost rows again


def test_a_partial_write_is_truncated_to_whole_rows(tmp_path: Path) -> None:
    files = TableFiles(tmp_path)
    files.take(losses(1, 4))
    with largest_file(2 * ROW_BYTES + 7), pytest.raises(RowsLostError, match="too large") as lost:
        files.flush()
    assert lost.value.rows == 2
    assert size(tmp_path) == 2 * ROW_BYTES
    files.take(loss(5))
    files.close()
    written = struct.unpack("<15d", (tmp_path / "0.f64").read_bytes())
    assert written[2::5] == (1.0, 2.0, 5.0)


def test_a_table_that_cannot_be_created_loses_all_rows_of_the_record(tmp_path: Path) -> None:
    files = TableFiles(tmp_path / "missing")
    with pytest.raises(RowsLostError, match="No such file") as lost:
        files.take(losses(1, 3))
    assert lost.value.rows == 3
    (tmp_path / "missing" / "0.json").mkdir(parents=True)
    with pytest.raises(RowsLostError, match="Is a directory"):  # also closes the file for rows
        files.take(loss(4))
    files.close()


def test_known_tables_accept_rows_at_the_maximum_number_of_tables(tmp_path: Path) -> None:
    files = TableFiles(tmp_path)
    for number in range(MOST_TABLES):
        files.take(rows([[0, 1, 1, 0.1, 1.0]], Columns(own=(str(number),))))
    with pytest.raises(RowsLostError, match=f"more than {MOST_TABLES} sets of metrics") as lost:
        files.take(losses(1, 2))
    assert lost.value.rows == 2
    files.take(rows([[0, 1, 2, 0.2, 1.0]], Columns(own=("0",))))
    files.close()
    assert size(tmp_path) == 2 * ROW_BYTES


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


def test_the_number_of_tables_is_limited(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in range(MOST_TABLES + 3):
        run.take(Metrics(rank=0, cell=1, epoch=1, step=step, time_s=0.0, own={f"loss{step}": 1.0}))
    run.close()
    assert len(read(run).tables()) == MOST_TABLES
    assert run.dropped == 3
    assert "report the same names" in run.fault
