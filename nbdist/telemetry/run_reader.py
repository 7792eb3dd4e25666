"""Reader of run directories, during a run and after its end."""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, get_args

import msgspec

from nbdist.errors import UsageError
from nbdist.records import (
    RUN_ID,
    RUN_VERSION,
    SHORT_ID,
    Media,
    RunState,
    RunStatus,
    Table,
    Writer,
)
from nbdist.telemetry.annotations import read_annotations
from nbdist.telemetry.media import decode_content, read_content, read_index
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.telemetry.run_writer import (
    CELLS_FILE,
    MEDIA_FOLDER,
    OUTPUT_FOLDER,
    RUN_FILE,
    SHOWN_FILE,
    STACKS_FOLDER,
    STOP_FILE,
    TABLES_FOLDER,
)
from nbdist.telemetry.stacks import StackFiles
from nbdist.telemetry.tables import FLOAT_BYTES
from nbdist.utils.processes import is_gone, is_here, is_silent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from nbdist.records import WorkerStack


_ENDED = frozenset(get_args(RunStatus)) - {"running", "stopping"}


class _Format(msgspec.Struct):
    """Field of `run.json` that every version writes."""

    version: int = RUN_VERSION


class _Ending(msgspec.Struct):
    """Fields of `run.json` that show whether a run has ended."""

    status: str
    writer: Writer
    program: str = ""


class StoredRun:
    """Directory of one run. Every method raises `OSError` if it was deleted.

    Attributes:
        path: directory of the run.
        id: id of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name

    def written(self) -> bytes:
        """Return the content of `run.json`."""
        return (self.path / RUN_FILE).read_bytes()

    def written_state(self) -> RunState:
        """Return the state in `run.json`, even if its writer is gone.

        Raises:
            msgspec.DecodeError: another version of nbdist wrote the file, or it is damaged.
        """
        written = self.written()
        try:
            version = msgspec.json.decode(written, type=_Format).version
            if version == RUN_VERSION:
                return msgspec.json.decode(written, type=RunState)
        except UnicodeDecodeError as error:  # msgspec does not convert it
            raise msgspec.DecodeError(str(error)) from error
        raise msgspec.ValidationError(
            f"it has version {version}, and this nbdist reads version {RUN_VERSION}"
        )

    def has_ended(self) -> bool:
        """Return True if the run has ended or its writer is gone. Reads runs of any version.

        Returns False if `run.json` does not contain this information.
        """
        written = self.written()
        try:
            ending = msgspec.json.decode(written, type=_Ending)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if ending.status in _ENDED:
            return True
        return self._is_left(ending) and self.written() == written  # no other process continues it

    def state(self) -> RunState:
        """Return the state of the run.

        If its writer is gone, or no longer responds on another host, the status is `lost`, and the
        end is the time of the last write.
        """
        state = self.written_state()
        while not state.is_over and self._is_left(state):
            later = self.written_state()
            if later == state:
                return msgspec.structs.replace(state, status="lost", ended=self._last_written())
            state = later  # the writer has ended the run, or another process continues it
        return state

    def tables(self) -> tuple[Table, ...]:
        """Return the existing tables, in order of creation."""
        tables: list[Table] = []
        while (table := self.table(len(tables))) is not None:
            tables.append(table)
        return tuple(tables)

    def table(self, number: int) -> Table | None:
        """Return the table with this number, from 0. None if it does not exist yet."""
        try:
            content = (self.path / TABLES_FOLDER / f"{number}.json").read_bytes()
        except FileNotFoundError:
            self._require_directory()
            return None
        return msgspec.json.decode(content, type=Table)

    def rows(self, table: Table, offset: int, limit: int) -> bytes:
        """Return whole rows in the format of the file.

        Args:
            table: table of this run.
            offset: number of rows to skip.
            limit: maximum number of rows.
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
        """Return the number of whole rows."""
        path = self.path / TABLES_FOLDER / f"{table.number}.f64"
        size = path.stat().st_size if path.exists() else 0
        return size // (FLOAT_BYTES * len(table.columns.names))

    def array(self, table: Table) -> np.ndarray:
        """Return all rows: shape (rows, len(table.columns.names)), float64."""
        import numpy as np

        rows = self.rows(table, 0, self.count(table))
        return np.frombuffer(rows, "<f8").reshape(-1, len(table.columns.names))

    def open_shown(self) -> BinaryIO:
        """Open the text shown by the cell, in UTF-8. It grows during the run."""
        return (self.path / SHOWN_FILE).open("rb")

    def output(self, rank: int) -> str:
        """Return all text of the rank."""
        return OutputLogs(self.path / OUTPUT_FOLDER).read(rank)

    def open_output(self, rank: int) -> BinaryIO | None:
        """Open the text of the rank, in UTF-8. None if it has written nothing."""
        try:
            return OutputLogs(self.path / OUTPUT_FOLDER).path(rank).open("rb")
        except FileNotFoundError:
            self._require_directory()
            return None

    def stack(self, rank: int) -> WorkerStack | None:
        """Return the last stored stack of the rank. None without one."""
        return StackFiles(self.path / STACKS_FOLDER).read(rank)

    def ask_for_stack(self, rank: int) -> None:
        """Ask the kernel for the current stack of the rank."""
        StackFiles(self.path / STACKS_FOLDER).request(rank)

    def media(self) -> Iterator[Media]:
        """Yield the histograms, images, tables and texts, in order of their arrival."""
        number = self.written_state().number
        for entry in read_index(self.media_path):
            yield Media(
                rank=entry.rank,
                cell=number,
                name=entry.name,
                epoch=entry.epoch,
                step=entry.step,
                time_s=entry.time_s,
                content=decode_content(read_content(self.media_path, entry)),
            )

    @property
    def media_path(self) -> Path:
        """Folder of the histograms, images, tables and texts. It may not exist."""
        return self.path / MEDIA_FOLDER

    def media_content(self, number: int) -> bytes | None:
        """Return the content of an entry of the index as JSON. None without such an entry."""
        entry = next((e for e in read_index(self.media_path) if e.number == number), None)
        return None if entry is None else read_content(self.media_path, entry)

    @property
    def cells(self) -> str:
        """Executed cells in percent format."""
        return (self.path / CELLS_FILE).read_text(encoding="utf-8")

    def ask_to_stop(self) -> None:
        """Ask the kernel to stop the run after the current step.

        A second request cancels the step.
        """
        with (self.path / STOP_FILE).open("ab") as file:
            file.write(b"\n")

    def withdraw_stop(self) -> None:
        """Withdraw all requests to stop."""
        with contextlib.suppress(OSError):  # nobody has asked, or the directory was deleted
            (self.path / STOP_FILE).unlink()

    def _require_directory(self) -> None:
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} was deleted")

    def _is_left(self, run: RunState | _Ending) -> bool:
        """Return True if the writer of the run is gone.

        The writer of a program's run shows other hosts that it runs: it changes the time of
        `run.json`. That of a notebook's run may pause.
        """
        if is_here(run.writer) or not run.program:
            return is_gone(run.writer)
        return is_silent(self.path / RUN_FILE)

    def _last_written(self) -> float:
        """Return the time of the last write, in seconds since 1970."""
        files = (self.path / RUN_FILE, *(self.path / TABLES_FOLDER).iterdir())
        return max(file.stat().st_mtime for file in files)


def find(root: Path, name: str) -> StoredRun:
    """Return the run with this id.

    Raises:
        UsageError: the id is malformed, or `root` contains no such run.
    """
    if not re.fullmatch(RUN_ID, name, re.ASCII):
        raise UsageError(f"{name!r} is not a run id: use nbdist.runs() to list the runs")
    path = root / name
    if path.resolve() != root.resolve() / name or not (path / RUN_FILE).is_file():
        raise UsageError(f"no run {name} in {root}: use nbdist.runs() to list the runs")
    return StoredRun(path)


def whole_id(root: Path, name: str) -> str:
    """Return the id of the run with this short id. Other names are returned unchanged."""
    is_short = re.fullmatch(SHORT_ID, name, re.ASCII)
    return next((path.name for path in root.glob(f"*-{name}")), name) if is_short else name


def why_unreadable(error: msgspec.DecodeError) -> str:
    """Return the reason why `written_state` raised this error."""
    damaged = "" if isinstance(error, msgspec.ValidationError) else ", or the file is damaged"
    return f"another version of nbdist wrote its run.json{damaged}: {error}"


@dataclass(frozen=True)
class Found:
    """Runs of a folder.

    Attributes:
        runs: runs that this version can read, newest first.
        refused: reasons for runs that it cannot read, by id, newest first.
    """

    runs: tuple[StoredRun, ...]
    refused: dict[str, str]


def search(root: Path) -> Found:
    """Find the runs in a folder. Other files and folders are skipped."""
    found = _newest_first(root)
    runs = tuple(run for run, why in found if not why)
    return Found(runs, {run.id: why for run, why in found if why})


def stored_runs(root: Path) -> tuple[StoredRun, ...]:
    """Return the runs in `root` that this version can read, newest first."""
    return search(root).runs


def prune(root: Path, keep: int, spared: str = "") -> tuple[str, ...]:
    """Delete the oldest ended runs beyond the newest `keep`. 0 keeps all.

    Pinned runs stay and do not count. Runs that this version cannot read count too. Their age is
    that of `run.json`. A run stays if its `run.json` does not show that it has ended.

    Args:
        root: folder of the runs.
        keep: number of runs to keep.
        spared: id of a run to keep in any case. A changed clock may make it look old.

    Returns:
        The ids of the deleted runs.
    """
    if not keep:
        return ()
    runs = [run for run, _ in _newest_first(root) if not read_annotations(run.path).pinned]
    return tuple(run.id for run in runs[keep:] if run.id != spared and delete(run))


def _newest_first(root: Path) -> list[tuple[StoredRun, str]]:
    """Return the runs in `root`, each with the reason why it cannot be read, else empty."""
    found: list[tuple[float, StoredRun, str]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            found.append(_dated(find(root, path.name)))
        except (UsageError, OSError):
            continue
    found.sort(key=lambda dated: dated[0], reverse=True)
    return [(run, why) for _, run, why in found]


def _dated(run: StoredRun) -> tuple[float, StoredRun, str]:
    """Return the start of a run, the run, and the reason why it cannot be read, else empty.

    An unreadable run has the time of its last change instead, in seconds since 1970 too.
    """
    try:
        return run.written_state().began, run, ""
    except msgspec.DecodeError as error:
        return (run.path / RUN_FILE).stat().st_mtime, run, why_unreadable(error)


def delete(run: StoredRun) -> bool:
    """Delete an ended run. Returns False if it has not ended, or its files cannot be deleted."""
    try:
        if not run.has_ended():
            return False
        shutil.rmtree(run.path)
    except OSError:  # owned by another user, or already deleted
        return False
    return True
