"""Runs that were kept: `nbdist.runs()` lists, opens and compares them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import msgspec

from nbdist.errors import UsageError
from nbdist.execution.result import Run, require_pandas
from nbdist.records import RUN_MIME, Rows, RunOutput, StepBegun
from nbdist.settings import Settings
from nbdist.telemetry import run_reader
from nbdist.views import formatting
from nbdist.views.run.runs_table import RunLine, RunsPicture

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from nbdist.records import Metrics, MimeBundle, RunState, Table
    from nbdist.telemetry.history import Reports

SHOWN_RUNS = 30
_ROWS_OF_THE_END = 4096


def runs() -> Runs:
    """The runs that were kept, newest first; also those that are under way."""
    return Runs([SavedRun(run) for run in run_reader.kept(Settings.from_environment().runs_path)])


def step_begun(state: RunState) -> StepBegun | None:
    """How a step cell was split, as its run was kept; None where the cell is none."""
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
    """A run as it was kept; one that is under way has what there is until now.

    Every property reads the disk anew, and raises `OSError` where the run was deleted.

    Attributes:
        id: names it.
    """

    def __init__(self, run: run_reader.StoredRun) -> None:
        self._kept = run
        self.id = run.id

    @property
    def state(self) -> RunState:
        """How it was made and how it ended."""
        return self._kept.state()

    @property
    def run(self) -> Run:
        """What `Cluster.run` returned."""
        state = self.state
        return Run(
            state.number, self._metrics(), begun=step_begun(state), recoveries=state.recoveries
        )

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Every metric as an array of shape (ranks, steps), float64: see `Run.history`."""
        return self._reports().history()

    @property
    def loss(self) -> np.ndarray:
        """The loss of every step, averaged over ranks: shape (steps,), float64.

        Raises:
            KeyError: none was reported.
        """
        mean: np.ndarray = self.metric("loss").mean(axis=0)
        return mean

    def metric(self, name: str) -> np.ndarray:
        """One metric: shape (ranks, steps), float64.

        Raises:
            KeyError: none of that name was reported; names those that were.
        """
        history = self.history
        if name not in history:
            there = ", ".join(history) or "none"
            raise KeyError(f"{name!r} was not reported by run {self.id}; there are: {there}")
        return history[name]

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each report of a rank: rank, epoch, step, time_s and the metrics.

        Raises:
            UsageError: pandas is not installed.
        """
        require_pandas()
        return self._reports().frame()

    def output(self, rank: int) -> str:
        """All text that the rank wrote."""
        return self._kept.output(rank)

    @property
    def cells(self) -> str:
        """The cells as they were run, in percent format."""
        return self._kept.cells

    def line(self, position: int) -> RunLine:
        """The run in a line, of its last rows only."""
        end = Run(0, self._metrics(_ROWS_OF_THE_END), recoveries=self.state.recoveries)
        steps = max((m.step for m in end.metrics if m.step > 0), default=0)
        loss = end.last("loss") if "loss" in end.names else float("nan")
        return RunLine(position, self.state, steps, loss)

    def _metrics(self, last: int = 0) -> tuple[Metrics, ...]:
        """The reports of all tables in the order of their times; the `last` of each, or all."""
        found: list[Metrics] = []
        for table in self._tables():
            there = self._kept.count(table)
            skipped = max(0, there - last) if last else 0
            values = self._kept.rows(table, skipped, there - skipped)
            found += Rows(rank=0, cell=0, columns=table.columns, values=values).unpacked()
        return tuple(sorted(found, key=lambda report: report.time_s))

    def _reports(self) -> Reports:
        from nbdist.telemetry.history import Reports

        tables = ((t.columns, self._kept.array(t)) for t in self._tables())
        return Reports.of_tables(tables, self.state.recoveries)

    def _tables(self) -> tuple[Table, ...]:
        """Those of which the history is."""
        is_step = self.state.replicas > 0
        return tuple(t for t in self._kept.tables() if t.columns.counts(is_step))

    def __repr__(self) -> str:
        return f"<nbdist run {self.id}: {self.line(0).text}>"

    def _repr_mimebundle_(self, **_: object) -> tuple[MimeBundle, MimeBundle]:
        """Text; a picture of the loss, or else the first metric, where there is a line to draw.

        JupyterLab with the extension shows the run itself, also while it goes on.
        """
        from nbdist.views.run.chart import marks, run_bundle

        text, reports = self.line(0).text, self._reports()
        recovered = marks(reports.recovered_after(), reports.recoveries)
        bundle, metadata = run_bundle(reports.history(), repr(self), text, recovered)
        output = RunOutput(id=self.id, text=text, over=self.state.is_over)
        return {RUN_MIME: msgspec.to_builtins(output), **bundle}, metadata


class Runs(Sequence[SavedRun]):
    """Runs, newest first; one is had by its position or by its id."""

    def __init__(self, items: Sequence[SavedRun]) -> None:
        self._items = tuple(items)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, chosen: int | str) -> SavedRun: ...
    @overload
    def __getitem__(self, chosen: slice) -> Runs: ...
    def __getitem__(self, chosen: int | str | slice) -> SavedRun | Runs:
        """One run; of a slice, its runs.

        Raises:
            UsageError: none has this id.
            IndexError: there are fewer.
        """
        if isinstance(chosen, slice):
            return Runs(self._items[chosen])
        if isinstance(chosen, int):
            return self._items[chosen]
        found = [run for run in self._items if run.id == chosen]
        if not found:
            raise UsageError(f"there is no run {chosen!r} among these {len(self)}")
        return found[0]

    def compare(self, *chosen: int | str, metric: str = "loss") -> Comparison:
        """One metric of several runs in one picture.

        Args:
            chosen: their positions or ids.
            metric: its mean over the ranks is drawn.

        Raises:
            UsageError: none was chosen.
            KeyError: one did not report the metric; names those that it did.
        """
        if not chosen:
            raise UsageError("compare needs runs: nbdist.runs().compare(0, 1)")
        runs = [self[one] for one in chosen]
        return Comparison(metric, {run.id: run.metric(metric) for run in runs})

    def _picture(self) -> RunsPicture:
        lines = []
        for position, run in enumerate(self._items[:SHOWN_RUNS]):
            with contextlib.suppress(OSError):  # deleted since it was listed
                lines.append(run.line(position))
        title = formatting.count(len(self), "run") if self._items else "no run was kept"
        return RunsPicture(title, lines, max(0, len(self) - SHOWN_RUNS))

    def __repr__(self) -> str:
        return "\n".join(self._picture().lines())

    def _repr_html_(self) -> str:
        return self._picture().html()


@dataclass(frozen=True, repr=False)
class Comparison:
    """One metric of several runs.

    Attributes:
        metric: its name.
        values: by run, of shape (ranks, steps); nan where there is none.
    """

    metric: str
    values: dict[str, np.ndarray]

    def __repr__(self) -> str:
        from nbdist.views.run.chart import mean_of_ranks

        ends = {name: mean_of_ranks(values) for name, values in self.values.items()}
        return "\n".join(
            f"{name}  {self.metric} {mean[-1]:.4g} after {formatting.count(len(mean), 'step')}"
            for name, mean in ends.items()
        )

    def _repr_mimebundle_(self, **_: object) -> tuple[MimeBundle, MimeBundle]:
        from nbdist.views.run.chart import CHART_WIDTH, comparison_chart

        picture = comparison_chart(self.values, self.metric)
        return (
            {"text/plain": repr(self), "image/png": picture},
            {"image/png": {"width": CHART_WIDTH}},
        )
