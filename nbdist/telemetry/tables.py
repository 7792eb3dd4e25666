"""Tables of reported rows: one file per set of columns, float64, little-endian, appended."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import Columns, Metrics, Rows, SystemSample, Table
from nbdist.utils.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

FLOAT_BYTES = 8
MOST_TABLES = 256
"""Maximum number of tables. A new metric name in every step would create a file per step."""

_HELD_BYTES = 1 << 16


class TableFile:
    """File of one table. Rows are buffered until `flush`, or until there are many.

    The file contains whole rows, unless the process was killed during a write. The JSON description
    is written after the file exists, because a failed number is used again.

    Raises:
        OSError: the file could not be created.
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
        """Append whole rows. Raises the errors of `flush`."""
        self._held += rows
        if len(self._held) > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows to the file system.

        Raises:
            RowsLostError: some rows could not be written and were discarded.
        """
        try:
            while self._held:
                self._require_file()
                del self._held[: self._file.write(self._held)]
        except OSError as error:
            lost = -(-len(self._held) // self.row_bytes)
            self._held.clear()
            self.truncate()
            raise RowsLostError(lost, error) from error

    def close(self) -> None:
        """Flush and close the file. Raises the errors of `flush`."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _require_file(self) -> None:
        """Raise FileNotFoundError if the file was deleted: writes to it would still succeed."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self._file.name} was deleted")

    def truncate(self) -> None:
        """Truncate the file to whole rows, after a partial write."""
        with contextlib.suppress(OSError):
            size = os.fstat(self._file.fileno()).st_size
            os.ftruncate(self._file.fileno(), size - size % self.row_bytes)


class RowsLostError(Exception):
    """Error: rows could not be written.

    Attributes:
        rows: number of lost rows.
    """

    def __init__(self, rows: int, reason: object) -> None:
        super().__init__(str(reason))
        self.rows = rows


class TableFiles:
    """Tables of one run.

    Args:
        folder: existing folder of the files.
        tables: existing tables, to which rows are appended.

    Raises:
        OSError: an existing table cannot be opened.
    """

    def __init__(self, folder: Path, tables: Iterable[Table] = ()) -> None:
        self._folder = folder
        self._files: dict[Columns, TableFile] = {}
        for table in tables:
            self._files[table.columns] = file = TableFile(folder, table)
            file.truncate()

    def take(self, record: Rows | Metrics | SystemSample) -> None:
        """Append the record's rows to their table.

        Raises:
            RowsLostError: these rows, or others in the buffer, could not be written.
        """
        rows = as_rows(record)
        self._append(rows.columns, rows.values)

    def flush(self) -> None:
        """Flush all tables, then raise RowsLostError if one failed."""
        self._each(TableFile.flush)

    def close(self) -> None:
        """Close all tables, then raise RowsLostError if one failed."""
        self._each(TableFile.close)

    def _append(self, columns: Columns, rows: bytes) -> None:
        file = self._files.get(columns) or self._new(columns, rows)
        if len(rows) % file.row_bytes:
            raise RowsLostError(
                1, f"{len(rows)} bytes are not a multiple of the row size {file.row_bytes}"
            )
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


def as_rows(record: Rows | Metrics | SystemSample) -> Rows:
    """Return a single report or sample as a table of one row. Rows are returned unchanged."""
    if isinstance(record, Rows):
        return record
    if isinstance(record, SystemSample):
        columns = Columns(system=tuple(record.values))
        row = (record.rank, -1, -1, record.time_s, *record.values.values())
    else:
        columns = Columns(own=tuple(record.own), shared=tuple(record.shared))
        place = (record.rank, record.epoch, record.step, record.time_s)
        row = (*place, *record.own.values(), *record.shared.values())
    return Rows(
        rank=record.rank,
        cell=record.cell,
        columns=columns,
        values=struct.pack(f"<{len(row)}d", *row),
    )
