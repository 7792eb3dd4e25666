"""Writer of run directories. A directory can be read at any time, even if its writer was killed.

<root>/<run id>/
    run.json            the `RunState`, replaced as a whole
    tables/<n>.json     a `Table`, written before its rows
    tables/<n>.f64      rows: float64, little-endian, appended
    output/rank-<N>.out text of a rank
    shown.txt           text shown by the cell, appended
    events/             event files for TensorBoard
    media/              histograms, images, tables and texts (`media.py`)
    cells.py            executed cells
    stop                created when a user asks the run to stop
    annotations.json    edits of a user, replaced as a whole (`annotations.py`)
    stacks/             stacks of the ranks, and requests for them
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import (
    RUN_ID,
    Media,
    Metrics,
    Planned,
    RankPosition,
    Rows,
    RunState,
    SystemSample,
)
from nbdist.telemetry.media import MediaFiles
from nbdist.telemetry.output_logs import OutputLogs
from nbdist.telemetry.stacks import StackFiles
from nbdist.telemetry.tables import RowsLostError, TableFiles
from nbdist.telemetry.tensorboard import EventFiles
from nbdist.utils.files import replace_file
from nbdist.utils.processes import is_gone

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Self

    from nbdist.records import AnyEvent, Plan, Table

RUN_FILE, CELLS_FILE, STOP_FILE, SHOWN_FILE = "run.json", "cells.py", "stop", "shown.txt"
PLAN_FILE = "plan.json"
TABLES_FOLDER, OUTPUT_FOLDER, EVENTS_FOLDER = "tables", "output", "events"
STACKS_FOLDER, MEDIA_FOLDER = "stacks", "media"
MEDIA_BYTES = 50_000_000
_MAKING_S = 3600.0
"""Age in seconds above which an unfinished directory is abandoned."""


def new_id(began: float) -> str:
    """Return an id that contains the local time.

    Args:
        began: start of the run, in seconds since 1970.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}-{secrets.token_hex(3)}"


class RunDirectory:
    """Writer of one run. Only opening raises disk errors, later ones are stored in `fault`.

    Args:
        path: directory of the run.
        state: state stored there.
        tables: existing tables.
        media_bytes: limit of the histograms, images, tables and texts.

    Attributes:
        path: directory of the run.
        state: latest state, even if it could not be written.
        dropped: number of rows that could not be stored.
        is_stale: True if the latest state could not be written.
        stacks: stacks of the ranks.
    """

    def __init__(
        self,
        path: Path,
        state: RunState,
        tables: Iterable[Table] = (),
        media_bytes: int = MEDIA_BYTES,
    ) -> None:
        self.path = path
        self.state = state
        self.dropped = 0
        self.is_stale = False
        self._faults: dict[str, str] = {}
        self._tables = TableFiles(path / TABLES_FOLDER, tables)
        self._logs = OutputLogs(path / OUTPUT_FOLDER)
        self.stacks = StackFiles(path / STACKS_FOLDER)
        opened = time.time() if tables else 0.0
        self._events = EventFiles(path / EVENTS_FOLDER, state.began, opened)
        self._media = MediaFiles(path / MEDIA_FOLDER, media_bytes)
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls, root: Path, state: RunState, cells: str, media_bytes: int = MEDIA_BYTES
    ) -> Self:
        """Create the directory, accessible to this user only.

        Args:
            root: folder of the runs, created if necessary.
            state: initial state. Its id is the name of the directory.
            cells: executed cells.
            media_bytes: limit of the histograms, images, tables and texts.

        Raises:
            FileExistsError: a run with this id exists.
            OSError: the directory cannot be created.
        """
        path, hidden = root / state.id, root / f".{state.id}.new"
        if path.exists():
            raise FileExistsError(f"run {state.id} already exists in {root}")
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(root)
        try:
            _fill(hidden, state, cells)
            hidden.rename(path)  # makes a complete directory visible
        except OSError:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return cls(path, state, media_bytes=media_bytes)

    @property
    def fault(self) -> str:
        """Description of data that could not be stored, with reasons. Empty if there is none."""
        faults = (*self._faults.values(), self._logs.fault, self._events.fault, self._media.fault)
        return "; ".join(filter(None, faults))

    def take(self, record: AnyEvent) -> None:
        """Store a record of a rank: reports, media, samples of the host, stacks, plans, text."""
        with self._lock:
            if self._closed:
                return
            if isinstance(record, Rows | Metrics):
                self._keep(record)
                self._events.take(record)
            elif isinstance(record, Media):
                if self._media.take(record):
                    self._events.take_media(record)
            elif isinstance(record, SystemSample):
                self._keep(record)
            elif isinstance(record, RankPosition):
                self._keep_stack(record)
            elif isinstance(record, Planned):
                self._keep_plan(record.plan)
            else:
                self._logs.take(record)

    def show(self, text: str) -> None:
        """Store text shown by the cell, even after the end of the run. Raises no disk errors."""
        try:
            with (self.path / SHOWN_FILE).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._faults["shown"] = f"cannot store all output of the cell: {error}"

    def flush(self) -> None:
        """Write buffered data to the file system."""
        self._logs.flush()
        with self._lock:
            try:
                self._tables.flush()
            except RowsLostError as error:
                self._lost(error)
        self._events.flush()

    def update(self, **changes: object) -> None:
        """Change fields of the state and write it."""
        with self._lock:
            self.state = msgspec.structs.replace(self.state, **changes)
            try:
                replace_file(self.path / RUN_FILE, msgspec.json.encode(self.state))
                self.is_stale = False
            except OSError as error:
                self.is_stale = True
                self._faults["state"] = f"the run's state could not be written: {error}"

    def beat(self) -> None:
        """Change the time of `run.json`: it shows other hosts that this process runs."""
        with contextlib.suppress(OSError):  # the directory was deleted
            os.utime(self.path / RUN_FILE)

    def _keep_stack(self, where: RankPosition) -> None:
        """Store a stack that nbdist or a user asked for, not those of regular queries."""
        if not where.clock_s:
            self.stacks.store(where)

    def _keep_plan(self, plan: Plan) -> None:
        """Store the plan of the steps in the format of `%%dist_run --plan`."""
        try:
            text = msgspec.json.format(msgspec.json.encode(plan))
            replace_file(self.path / PLAN_FILE, text)
        except OSError as error:
            self._faults["plan"] = f"the plan could not be stored: {error}"

    def stops_requested(self) -> int:
        """Return the number of stop requests. Each request appends a byte to the file."""
        try:
            return (self.path / STOP_FILE).stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Write the remaining data. Later records are ignored."""
        with self._lock:
            self._closed = True
            try:
                self._tables.close()
            except RowsLostError as error:
                self._lost(error)
        self._logs.close()
        self._events.close()

    def discard(self) -> None:
        """Delete the directory of a run without reports."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _keep(self, record: Rows | Metrics | SystemSample) -> None:
        try:
            self._tables.take(record)
        except RowsLostError as error:
            self._lost(error)

    def _lost(self, error: RowsLostError) -> None:
        self.dropped += error.rows
        self._faults["rows"] = f"{self.dropped} rows could not be stored: {error}"


def _fill(folder: Path, state: RunState, cells: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / TABLES_FOLDER).mkdir()
    (folder / OUTPUT_FOLDER).mkdir()
    (folder / SHOWN_FILE).touch()
    (folder / CELLS_FILE).write_text(cells, encoding="utf-8")
    replace_file(folder / RUN_FILE, msgspec.json.encode(state))


def _sweep(root: Path) -> None:
    """Remove directories of runs whose creation was interrupted. Other files stay."""
    for folder in root.iterdir():
        if re.fullmatch(rf"\.{RUN_ID}\.new", folder.name, re.ASCII) and _is_left(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Return True if the creator of the directory is gone, or it is too old."""
    try:
        if time.time() - folder.stat().st_mtime > _MAKING_S:
            return True
        state = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError):  # not yet written, or completed meanwhile
        return False
    return is_gone(state.writer)
