"""Rows of reports in files: one for each set of columns, float64, little-endian, appended."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import Columns, Metrics, Rows, Table
from nbdist.utils.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

FLOAT_BYTES = 8
MOST_TABLES = 256
"""A metric with another name in every step would make a file of each."""

_HELD_BYTES = 1 << 16


class TableFile:
    """One table's file. Rows are held until `flush`, or until there are many.

    A file holds whole rows only, but where the process was killed while it wrote. Nobody reads it
    before the table is told: a number whose file could not be made may be another table's.

    Raises:
        OSError: it could not be made.
    """

    def __init__(self, folder: Path, table: Table) -> None:
        with contextlib.ExitStack() as undo:
            file = (folder / f"{table.number}.f64").open("ab", buffering=0)
            undo.callback(file.close)
            replace_file(folder / f"{table.number}.json", msgspec.json.encode(table))
            undo.pop_all()
        self.row_bytes = FLOAT_BYTES * len(table.columns.names)
        self._file = file
        self._held = bytearray()

    def append(self, rows: bytes) -> None:
        """Take whole rows. The errors are those of `flush`."""
        self._held += rows
        if len(self._held) > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what is held to the file system.

        Raises:
            RowsLostError: some rows could not be written, and are no longer held.
        """
        try:
            while self._held:
                self._require_file()
                del self._held[: self._file.write(self._held)]
        except OSError as error:
            lost = -(-len(self._held) // self.row_bytes)
            self._held.clear()
            self.cut()
            raise RowsLostError(lost, error) from error

    def close(self) -> None:
        """The errors are those of `flush`."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _require_file(self) -> None:
        """A file that was deleted takes rows without a word: that is said instead."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self._file.name} was deleted")

    def cut(self) -> None:
        """Back to whole rows, after one that was written in part."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._file.fileno()).st_size
            os.ftruncate(self._file.fileno(), size - size % self.row_bytes)


class RowsLostError(Exception):
    """Rows could not be written.

    Attributes:
        rows: how many.
    """

    def __init__(self, rows: int, reason: object) -> None:
        super().__init__(str(reason))
        self.rows = rows


class TableFiles:
    """The tables of one run.

    Args:
        folder: where the files go; it is there.
        tables: those that are in it, to which rows are added.

    Raises:
        OSError: one of these cannot be opened.
    """

    def __init__(self, folder: Path, tables: Iterable[Table] = ()) -> None:
        self._folder = folder
        self._files: dict[Columns, TableFile] = {}
        for table in tables:
            self._files[table.columns] = file = TableFile(folder, table)
            file.cut()

    def take(self, record: Rows | Metrics) -> None:
        """Append the record's rows to their table.

        Raises:
            RowsLostError: they, or others that were held, could not be kept.
        """
        rows = as_rows(record)
        self._append(rows.columns, rows.values)

    def flush(self) -> None:
        """Raises: RowsLostError, once all tables were tried."""
        self._each(TableFile.flush)

    def close(self) -> None:
        """Raises: RowsLostError, once all tables are closed."""
        self._each(TableFile.close)

    def _append(self, columns: Columns, rows: bytes) -> None:
        file = self._files.get(columns) or self._new(columns, rows)
        if len(rows) % file.row_bytes:
            raise RowsLostError(1, f"{len(rows)} bytes are no whole rows of {file.row_bytes}")
        file.append(rows)

    def _new(self, columns: Columns, rows: bytes) -> TableFile:
        lost = len(rows) // (FLOAT_BYTES * len(columns.names))
        if len(self._files) == MOST_TABLES:
            raise RowsLostError(
                lost,
                f"more than {MOST_TABLES} sets of metrics were reported: "
                "report the same names in every step",
            )
        try:
            file = TableFile(self._folder, Table(number=len(self._files), columns=columns))
        except OSError as error:
            raise RowsLostError(lost, error) from error
        self._files[columns] = file
        return file

    def _each(self, done: Callable[[TableFile], None]) -> None:
        lost, reason = 0, ""
        for file in self._files.values():
            try:
                done(file)
            except RowsLostError as error:
                lost, reason = lost + error.rows, str(error)
        if lost:
            raise RowsLostError(lost, reason)


def as_rows(record: Rows | Metrics) -> Rows:
    """A single report as a table of one row; rows as they are."""
    if isinstance(record, Rows):
        return record
    place = (record.rank, record.epoch, record.step, record.time_s)
    row = (*place, *record.own.values(), *record.shared.values())
    return Rows(
        rank=record.rank,
        cell=record.cell,
        columns=Columns(own=tuple(record.own), shared=tuple(record.shared)),
        values=struct.pack(f"<{len(row)}d", *row),
    )
