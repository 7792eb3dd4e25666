"""Stored runs: `nbdist.runs()` lists, opens and compares them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import msgspec

from nbdist.errors import RowKeyError, UsageError
from nbdist.execution.result import Run, picture_of
from nbdist.records import RUN_MIME, Rows, RunOutput, StepBegun, short_id
from nbdist.settings import Settings
from nbdist.telemetry import run_reader
from nbdist.telemetry.annotations import read_annotations, renamed
from nbdist.views import formatting
from nbdist.views.result_table import ResultTable, require_pandas
from nbdist.views.run.runs_table import RunLine, RunsPicture
from nbdist.views.run.summary import Reached, described, titled

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import numpy as np
    import pandas as pd

    from nbdist.records import Annotations, Media, Metrics, MimeBundle, RunState, Table
    from nbdist.telemetry.history import Reports

SHOWN_RUNS = 30
_COLUMNS = (
    "id",
    "name",
    "tags",
    "note",
    "pinned",
    "began",
    "ended",
    "seconds",
    "status",
    "cell",
    "strategy",
    "framework",
    "workers",
    "replicas",
    "batch",
    "steps",
    "loss",
    "seed",
)
_ROWS_OF_THE_END = 4096


def runs(folder: str | os.PathLike[str] | None = None) -> Runs:
    """Return the saved runs, newest first, including those in progress.

    Args:
        folder: Folder of the runs, such as that of a job. Default: that of `NBDIST_RUNS_FOLDER`.

    Returns:
        A sequence of `SavedRun`. Index it by position, by slice or by id. `to_dataframe()` has one
        line for each run, with times in seconds and UTC, the last values of metrics as
        `metrics.NAME`, and hyperparameters as `hyperparameters.NAME`. A run of another version of
        nbdist is listed below the table with the reason, and is no row.

    Examples:
        >>> runs = nbdist.runs()
        >>> len(runs)
        2
        >>> runs[0].loss  # mean over ranks, shape (steps,)
        array([1.05, 2.05, 3.05])
        >>> runs[0].history["loss"].shape  # (ranks, steps)
        (2, 3)
        >>> runs[runs[0].id] == runs[0]
        True
        >>> runs.to_dataframe()[["status", "workers", "steps", "loss"]]
             status  workers  steps  loss
        0  finished        2      3  3.05
        1  finished        2      5  5.05
        >>> runs.compare(0, 1)  # a picture in a notebook
        Cell ... loss 3.05 after 3 steps
        Cell ... loss 5.05 after 5 steps
    """
    path = Settings.from_environment().runs_path if folder is None else Path(folder).expanduser()
    found = run_reader.search(path)
    return Runs([SavedRun(run) for run in found.runs], found.refused)


def step_begun(state: RunState) -> StepBegun | None:
    """Return the batch and the replicas of a stored step cell; None for other cells."""
    if not state.replicas:
        return None
    return StepBegun(
        rank=0,
        cell=state.number,
        replicas=state.replicas,
        batch=state.batch,
        samples=state.samples,
        epochs=state.epochs,
        steps=state.steps,
        sharding=state.split,
        rates=(),
    )


class SavedRun:
    """A stored run. A run in progress contains its reports so far.

    Every property reads the disk again. It raises `OSError` if the run was deleted.

    Attributes:
        id: the id of the run.
    """

    def __init__(self, run: run_reader.StoredRun) -> None:
        self._kept = run
        self.id = run.id

    @property
    def state(self) -> RunState:
        """The stored state: status, cell, workers, versions and times."""
        return self._kept.state()

    @property
    def run(self) -> Run:
        """The result, as `Cluster.run` returned it."""
        state = self.state
        return Run(
            state.number,
            self._metrics(),
            begun=step_begun(state),
            recoveries=state.recoveries,
            state=state,
        )

    @property
    def history(self) -> dict[str, np.ndarray]:
        """All metrics by name, as float64 arrays of shape `(ranks, steps)`: see `Run.history`."""
        return self._reports().history()

    @property
    def loss(self) -> np.ndarray:
        """The mean loss over the ranks for each step: float64, shape `(steps,)`.

        Raises:
            KeyError: no loss was reported.
        """
        mean: np.ndarray = self.metric("loss").mean(axis=0)
        return mean

    def metric(self, name: str) -> np.ndarray:
        """Return one metric as a float64 array of shape `(ranks, steps)`.

        Raises:
            KeyError: no rank reported it. The message contains the reported metrics.
        """
        history = self.history
        if name not in history:
            there = ", ".join(history) or "none"
            raise KeyError(f"{name!r} was not reported by run {self.id}; reported metrics: {there}")
        return history[name]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each report of a rank: rank, epoch, step, time_s and the metrics.

        Raises:
            UsageError: pandas is not installed.
        """
        require_pandas()
        return self._reports().frame()

    def media(self, name: str = "") -> tuple[Media, ...]:
        """Return the histograms, images, tables and texts that the ranks reported, oldest first.

        Args:
            name: name of the values; empty for all.
        """
        return tuple(item for item in self._kept.media() if name in ("", item.name))

    def output(self, rank: int) -> str:
        """Return all text that a rank wrote."""
        return self._kept.output(rank)

    @property
    def cells(self) -> str:
        """The cells of the cluster up to this run, in percent format."""
        return self._kept.cells

    def __eq__(self, other: object) -> bool:
        """Return True for the same folder."""
        return (
            self._kept.path == other._kept.path if isinstance(other, SavedRun) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(self._kept.path)

    @property
    def annotations(self) -> Annotations:
        """The name, tags, note and pin that the user has set."""
        return read_annotations(self._kept.path)

    def values(self) -> dict[str, float | str | None]:
        """Return the last metrics as `metrics.NAME`, and `hyperparameters.NAME`."""
        from nbdist.telemetry.run_table import last_values

        state = self.state
        _, metrics = last_values(self._kept, state)
        return {
            **{f"metrics.{name}": value for name, value in metrics.items()},
            **{f"hyperparameters.{name}": v for name, v in state.hyperparameters.items()},
        }

    def line(self, position: int) -> RunLine:
        """Return one line on the run. It reads only the last rows."""
        from nbdist.telemetry.history import without_superseded

        state = renamed(self.state, self._kept.path)
        ends = self._metrics(_ROWS_OF_THE_END, batches=True)
        reached = Reached.of(without_superseded(ends, state.recoveries), state.kind)
        return RunLine(position, state, reached)

    def _metrics(self, last: int = 0, *, batches: bool = False) -> tuple[Metrics, ...]:
        """Return the reports of all tables in the order of their times.

        Args:
            last: number of rows to read from the end of each table; 0 for all.
            batches: also return the batches of a `fit`.
        """
        found: list[Metrics] = []
        for table in self._tables(batches=batches):
            there = self._kept.count(table)
            skipped = max(0, there - last) if last else 0
            values = self._kept.rows(table, skipped, there - skipped)
            found += Rows(rank=0, cell=0, columns=table.columns, values=values).unpacked()
        return tuple(sorted(found, key=lambda report: report.time_s))

    def _reports(self, *, batches: bool = False) -> Reports:
        from nbdist.telemetry.history import Reports

        tables = ((t.columns, self._kept.array(t)) for t in self._tables(batches=batches))
        return Reports.of_tables(tables, self.state.recoveries)

    def _tables(self, *, batches: bool) -> tuple[Table, ...]:
        """Return the tables that count for the history, or also those of a `fit`'s batches."""
        is_step = batches or self.state.replicas > 0
        return tuple(t for t in self._kept.tables() if t.columns.counts(is_step))

    def __repr__(self) -> str:
        line = self.line(0)
        return f"<nbdist run {titled(line.state)}: {described(line.state, line.reached)}>"

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        """Return the text, and a chart of the loss or the first metric if it has two points.

        JupyterLab with the extension shows the run itself, also while it is in progress.
        """
        text = repr(self)
        bundle = picture_of(self._reports(batches=True), text, self.state.kind)
        output = RunOutput(id=self.id, text=text, over=self.state.is_over)
        return {RUN_MIME: msgspec.to_builtins(output), **bundle}


class Runs(ResultTable[SavedRun]):
    """Saved runs, newest first. Index them by position, slice or id.

    Args:
        items: The runs.
        refused: Reasons by id of runs that cannot be read.
    """

    def __init__(self, items: Sequence[SavedRun], refused: Mapping[str, str] | None = None) -> None:
        self._items = tuple(items)
        self._refused = dict(refused or {})

    @property
    def rows(self) -> tuple[SavedRun, ...]:
        return self._items

    def __eq__(self, other: object) -> bool:
        """Return True for the same runs in the same order."""
        return self._items == other._items if isinstance(other, Runs) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    @overload
    def __getitem__(self, chosen: int | str) -> SavedRun: ...
    @overload
    def __getitem__(self, chosen: slice) -> Runs: ...
    def __getitem__(self, chosen: int | str | slice) -> SavedRun | Runs:
        """Return one run, or the runs of a slice.

        Raises:
            RowKeyError: No run has this id.
            UsageError: Another version of nbdist wrote the run.
            IndexError: No run is at this position.
        """
        if isinstance(chosen, slice):
            return Runs(self._items[chosen])
        if not isinstance(chosen, str):
            return self._items[chosen]
        if chosen in self._refused:
            raise UsageError(
                f"run {chosen} cannot be read: {self._refused[chosen]}: open it with that version"
            )
        found = [run for run in self._items if chosen in (run.id, short_id(run.id))]
        if not found:
            raise RowKeyError(f"no run {chosen!r} among these {len(self)}")
        return found[0]

    def _key(self, index: int, row: SavedRun) -> str:
        return row.id

    def _fields(self, row: SavedRun) -> dict[str, object]:
        import pandas as pd

        line = row.line(0)
        state, annotations = line.state, row.annotations
        ended = pd.to_datetime(state.ended, unit="s", utc=True) if state.ended else pd.NaT
        return {
            "id": state.id,
            "name": annotations.name or state.title,
            "tags": list(annotations.tags),
            "note": annotations.note,
            "pinned": annotations.pinned,
            "began": pd.to_datetime(state.began, unit="s", utc=True),
            "ended": ended,
            "seconds": state.seconds if state.ended else float("nan"),
            "status": state.status,
            "cell": state.header,
            "strategy": state.strategy,
            "framework": state.framework,
            "workers": len(state.workers),
            "replicas": state.replicas,
            "batch": state.batch,
            "steps": line.reached.step,
            "loss": line.reached.value if line.reached.metric == "loss" else float("nan"),
            "seed": state.seed,
        }

    def _columns(self) -> list[str]:
        return list(_COLUMNS)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each run, with its metrics and hyperparameters.

        Columns of hyperparameters contain text if one of their values is text.

        Raises:
            UsageError: pandas is not installed.
        """
        frame = super().to_dataframe()
        import pandas as pd

        values = pd.DataFrame([row.values() for row in self._items], index=frame.index)
        for name in values.select_dtypes("object"):
            values[name] = values[name].map(str, na_action="ignore")
        return pd.concat([frame, values], axis=1)

    def compare(self, *chosen: int | str, metric: str = "loss") -> Comparison:
        """Show one metric of several runs in one chart.

        Args:
            chosen: positions or ids of the runs.
            metric: the metric. The chart shows its mean over the ranks.

        Raises:
            UsageError: no run was chosen.
            KeyError: a run did not report the metric. The message contains the reported ones.
        """
        if not chosen:
            raise UsageError("compare needs at least one run: use nbdist.runs().compare(0, 1)")
        runs = [self[one] for one in chosen]
        names = {run.id: titled(run.state) for run in runs}
        return Comparison(metric, {run.id: run.metric(metric) for run in runs}, names)

    def _picture(self) -> RunsPicture:
        lines = []
        for position, run in enumerate(self._items[:SHOWN_RUNS]):
            with contextlib.suppress(OSError):  # deleted since it was listed
                lines.append(run.line(position))
        title = formatting.count(len(self), "run") if self._items else "no stored runs"
        return RunsPicture(title, lines, max(0, len(self) - SHOWN_RUNS), self._refused)

    def lines(self) -> list[str]:
        return self._picture().lines()

    def html(self) -> str:
        return self._picture().html()


@dataclass(frozen=True, repr=False)
class Comparison:
    """Comparison of one metric between runs.

    Attributes:
        metric: the name of the metric.
        values: by id of the run, shape `(ranks, steps)`; nan for missing values.
        names: names by id of the run.
    """

    metric: str
    values: dict[str, np.ndarray]
    names: dict[str, str]

    def __repr__(self) -> str:
        from nbdist.views.run.chart import points_of_ranks

        points = {run: points_of_ranks(values) for run, values in self.values.items()}
        return "\n".join(
            f"{self.names[run]}  {self.metric} {mean[-1]:.4g} after "
            f"{formatting.count(int(steps[-1]), 'step')}"
            for run, (steps, mean) in points.items()
        )

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        from nbdist.views import html
        from nbdist.views.run.chart import CHART_WIDTH, comparison_chart

        text, most_bytes = repr(self), Settings.from_environment().picture_bytes
        named = {self.names[run]: values for run, values in self.values.items()}
        png = comparison_chart(named, self.metric, most_bytes)
        picture = html.picture(png, f"Chart: {text}", CHART_WIDTH)
        return {"text/plain": text, **({"text/html": picture} if png else {})}
