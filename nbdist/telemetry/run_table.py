"""Rows of the table of all runs, and curves of single runs."""

from __future__ import annotations

import math
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from nbdist.records import PLACE, RUN_ID, RunCurve, RunRow, RunTable
from nbdist.telemetry.annotations import ANNOTATIONS_FILE, read_annotations
from nbdist.telemetry.history import standing
from nbdist.telemetry.run_reader import StoredRun
from nbdist.telemetry.run_writer import RUN_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.records import CurveAxis, RecoveryRecord, RunState, Table

CURVE_POINTS = 1000
"""Largest number of points of a curve."""

_ROWS_OF_THE_END = 512
"""Rows of a table that are read for the last values. All ranks are among them."""

_RANK, _EPOCH, _STEP, _TIME = range(len(PLACE))
_Signature = tuple[int, ...]


class RunRows:
    """Rows of all runs in a folder. Rows of files that have not changed are not read again.

    Args:
        root: folder of the runs.
        home: folder of the notebooks on the Jupyter server.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = home
        self._rows: dict[str, tuple[_Signature, RunRow]] = {}
        self._lock = threading.Lock()

    def table(self) -> RunTable:
        """Return all runs, newest first. Unreadable and deleted runs are skipped."""
        with self._lock:
            self._rows = dict(self._read())
            rows = [row for _, row in self._rows.values()]
        rows.sort(key=lambda row: row.state.began, reverse=True)
        return RunTable(rows=tuple(rows))

    def _read(self) -> Iterable[tuple[str, tuple[_Signature, RunRow]]]:
        for name in _folders(self._root):
            try:
                signature = _signature(self._root / name)
                known = self._rows.get(name)
                if known is None or known[0] != signature or not known[1].state.is_over:
                    known = signature, self._row(StoredRun(self._root / name))
                yield name, known
            except (OSError, msgspec.DecodeError):
                continue

    def _row(self, run: StoredRun) -> RunRow:
        state = run.state()
        step, metrics = last_values(run, state)
        return RunRow(
            state=msgspec.structs.replace(state, workers=(), versions={}, findings=(), plan=None),
            annotations=read_annotations(run.path),
            metrics=metrics,
            step=step,
            ranks=len(state.workers),
            notebook=self._served(state.notebook),
        )

    def _served(self, notebook: str) -> str:
        """Return the path relative to the home folder. Empty if it is outside or is gone."""
        path = Path(os.path.normpath(self._home / notebook))
        inside = notebook and path.is_relative_to(self._home) and path.is_file()
        return path.relative_to(self._home).as_posix() if inside else ""


def last_values(run: StoredRun, state: RunState) -> tuple[int, dict[str, float | None]]:
    """Return the last reported step, and the mean over ranks of the last value of each metric.

    Of a metric with values of steps and of epochs, it is the value of an epoch in a `fit`, and that
    of a step in other runs, as in the view of the run.
    """
    step, of_steps, of_epochs = -1, dict[str, float | None](), dict[str, float | None]()
    for table in run.tables():
        count = run.count(table)
        rows = _array(table, run.rows(table, max(0, count - _ROWS_OF_THE_END), count))
        rows = rows[standing(rows[:, : len(PLACE)], state.recoveries)]
        if not len(rows):
            continue
        step = max(step, int(rows[:, _STEP].max()))
        metrics = of_steps if rows[-1, _STEP] >= 0 else of_epochs
        _, last = np.unique(rows[::-1, _RANK], return_index=True)
        for name, values in _metrics(table, rows[::-1][last]):
            mean = float(values.mean())
            metrics[name] = mean if math.isfinite(mean) else None
    first, then = (of_steps, of_epochs) if state.kind == "fit" else (of_epochs, of_steps)
    return step, first | then


def curve(run: StoredRun, metric: str, points: int = CURVE_POINTS) -> RunCurve:
    """Return the mean of a metric over ranks.

    Reports of steps take precedence over those of epochs. If there are more than `points` places,
    each point is the mean of neighbours.

    Raises:
        KeyError: no rank reported the metric.
        OSError: the run was deleted.
    """
    recoveries = run.written_state().recoveries
    found = [_reported(run, table, metric, recoveries) for table in run.tables()]
    reports = [rows for rows in found if len(rows)]
    if not reports:
        raise KeyError(metric)
    places, values = np.split(np.concatenate(reports), [len(PLACE)], axis=1)
    axis, x = _axis(places)
    chosen = x >= 0
    x, inverse, counts = np.unique(x[chosen], return_inverse=True, return_counts=True)
    seconds = np.bincount(inverse, places[chosen, _TIME]) / counts
    means = np.bincount(inverse, values[chosen, 0]) / counts
    return _curve(axis, np.stack([x, seconds, means]), points)


def _curve(axis: CurveAxis, lines: np.ndarray, points: int) -> RunCurve:
    """Return the curve of at most `points` points of `lines`, shape (3, places)."""
    size = -(-lines.shape[1] // points)
    starts = np.arange(0, lines.shape[1], size)
    lengths = np.diff([*starts, lines.shape[1]])
    with np.errstate(invalid="ignore"):
        x, seconds, y = (np.add.reduceat(lines, starts, axis=1) / lengths).tolist()
    finite = (value if math.isfinite(value) else None for value in y)
    return RunCurve(axis=axis, x=tuple(x), seconds=tuple(seconds), y=tuple(finite))


def _reported(
    run: StoredRun, table: Table, metric: str, recoveries: Sequence[RecoveryRecord]
) -> np.ndarray:
    """Return place and value of each valid report of the metric: shape (reports, 5)."""
    if metric not in (*table.columns.own, *table.columns.shared):
        return np.empty((0, len(PLACE) + 1))
    rows = run.array(table)
    rows = rows[standing(rows[:, : len(PLACE)], recoveries)]
    values = dict(_metrics(table, rows))[metric]
    return np.column_stack([rows[:, : len(PLACE)], values])


def _axis(places: np.ndarray) -> tuple[CurveAxis, np.ndarray]:
    """Return the axis of reports, and the position of each report; negative to leave it out."""
    if (places[:, _STEP] >= 0).any():
        return "step", places[:, _STEP]
    if (places[:, _EPOCH] >= 0).any():
        return "epoch", places[:, _EPOCH]
    number = np.empty(len(places))
    for rank in np.unique(places[:, _RANK]):
        own = places[:, _RANK] == rank
        number[own] = np.arange(1, own.sum() + 1)
    return "report", number


def _metrics(table: Table, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the columns of the metrics of rows. A rank's own value takes precedence."""
    columns = table.columns
    first = len(PLACE) + len(columns.measures)
    own = zip(columns.own, rows[:, first:].T, strict=False)
    shared = zip(columns.shared, rows[:, first + len(columns.own) :].T, strict=False)
    return [*shared, *own]


def _array(table: Table, rows: bytes) -> np.ndarray:
    return np.frombuffer(rows, "<f8").reshape(-1, len(table.columns.names))


def _folders(root: Path) -> list[str]:
    """Return the names of the directories of runs. Links are skipped."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return [
            entry.name
            for entry in entries
            if re.fullmatch(RUN_ID, entry.name, re.ASCII) and entry.is_dir(follow_symlinks=False)
        ]


def _signature(folder: Path) -> _Signature:
    """Return the times and sizes of the files that a row of an ended run comes from."""
    state = (folder / RUN_FILE).stat()
    try:
        edits = (folder / ANNOTATIONS_FILE).stat()
    except FileNotFoundError:
        return state.st_mtime_ns, state.st_size
    return state.st_mtime_ns, state.st_size, edits.st_mtime_ns, edits.st_size
