"""Runs as they are read: while they are written, after their end, after their writer's."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from nbdist.errors import UsageError
from nbdist.records import RUN_ID, RunState, Table
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.telemetry.run_writer import (
    CELLS_FILE,
    OUTPUT_FOLDER,
    RUN_FILE,
    SHOWN_FILE,
    STOP_FILE,
    TABLES_FOLDER,
)
from nbdist.telemetry.tables import FLOAT_BYTES
from nbdist.utils.processes import is_gone

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


class StoredRun:
    """One run's directory. Every method raises `OSError` where it has been deleted.

    Attributes:
        path: the directory.
        id: the run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    def written(self) -> bytes:
        """The whole of `run.json`."""
        return (self.path / RUN_FILE).read_bytes()

    def written_state(self) -> RunState:
        """What `run.json` says, whether or not its writer is still there."""
        return msgspec.json.decode(self.written(), type=RunState)

    def state(self) -> RunState:
        """How the run is: `lost`, and ended when it last wrote, if its writer is gone."""
        state = self.written_state()
        if state.is_over or not is_gone(state.writer):
            return state
        state = self.written_state()  # it may have ended the run just before it went
        if state.is_over:
            return state
        return msgspec.structs.replace(state, status="lost", ended=self._last_written())

    def tables(self) -> tuple[Table, ...]:
        """The tables there are, in the order they came."""
        tables: list[Table] = []
        while (table := self.table(len(tables))) is not None:
            tables.append(table)
        return tuple(tables)

    def table(self, number: int) -> Table | None:
        """Table `number`, counted from 0; None if there is none yet."""
        try:
            content = (self.path / TABLES_FOLDER / f"{number}.json").read_bytes()
        except FileNotFoundError:
            self._require_directory()
            return None
        return msgspec.json.decode(content, type=Table)

    def rows(self, table: Table, offset: int, limit: int) -> bytes:
        """Rows as they are in the file, whole ones only.

        Args:
            table: of this run.
            offset: rows to skip.
            limit: rows to read at most.
        """
        row_bytes = FLOAT_BYTES * len(table.columns.names)
        try:
            with (self.path / TABLES_FOLDER / f"{table.number}.f64").open("rb") as file:
                file.seek(offset * row_bytes)
                rows = file.read(limit * row_bytes)
        except FileNotFoundError:  # no row was written yet
            self._require_directory()
            return b""
        return rows[: len(rows) - len(rows) % row_bytes]

    def count(self, table: Table) -> int:
        """How many whole rows there are."""
        path = self.path / TABLES_FOLDER / f"{table.number}.f64"
        size = path.stat().st_size if path.exists() else 0
        return size // (FLOAT_BYTES * len(table.columns.names))

    def array(self, table: Table) -> np.ndarray:
        """All rows: shape (rows, len(table.columns.names)), float64."""
        import numpy as np

        rows = self.rows(table, 0, self.count(table))
        return np.frombuffer(rows, "<f8").reshape(-1, len(table.columns.names))

    def open_shown(self) -> BinaryIO:
        """What the cell shows as text, in UTF-8; it grows while the run goes on."""
        return (self.path / SHOWN_FILE).open("rb")

    def output(self, rank: int) -> str:
        """All text that the rank wrote."""
        return OutputLogs(self.path / OUTPUT_FOLDER).read(rank)

    @property
    def cells(self) -> str:
        """The cells as they were run, in percent format."""
        return (self.path / CELLS_FILE).read_text(encoding="utf-8")

    def ask_to_stop(self) -> None:
        """Ask the kernel to end the run at the end of a step; asked again, to break it off."""
        with (self.path / STOP_FILE).open("ab") as file:
            file.write(b"\n")

    def _require_directory(self) -> None:
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} was deleted")

    def _last_written(self) -> float:
        """When, in seconds since 1970."""
        files = (self.path / RUN_FILE, *(self.path / TABLES_FOLDER).iterdir())
        return max(file.stat().st_mtime for file in files)


def find(root: Path, name: str) -> StoredRun:
    """The run of that id.

    Raises:
        UsageError: it is no id, or there is no such run in `root` itself.
    """
    if not re.fullmatch(RUN_ID, name, re.ASCII):
        raise UsageError(f"{name!r} is no run's id: see nbdist.runs()")
    path = root / name
    if path.resolve() != root.resolve() / name or not (path / RUN_FILE).is_file():
        raise UsageError(f"there is no run {name} in {root}: see nbdist.runs()")
    return StoredRun(path)


def kept(root: Path) -> tuple[StoredRun, ...]:
    """The runs in `root`, newest first; what is none is skipped."""
    began: dict[StoredRun, float] = {}
    for path in root.iterdir() if root.is_dir() else ():
        try:
            run = find(root, path.name)
            began[run] = run.written_state().began
        except (UsageError, OSError, msgspec.DecodeError):
            continue
    return tuple(sorted(began, key=began.__getitem__, reverse=True))


def prune(root: Path, keep: int, spared: str = "") -> tuple[str, ...]:
    """Delete the oldest runs that are over, beyond the newest `keep` of all; 0 keeps all.

    Args:
        root: the folder of the runs.
        keep: how many are kept.
        spared: the id of a run that stays, however old it looks to a clock that was set.

    Returns:
        The ids of those that are gone.
    """
    old = kept(root)[keep:] if keep else ()
    return tuple(run.id for run in old if run.id != spared and _deleted(run))


def _deleted(run: StoredRun) -> bool:
    try:
        if not run.state().is_over:
            return False
        shutil.rmtree(run.path)
    except OSError:  # somebody else's, or deleted meanwhile
        return False
    return True
