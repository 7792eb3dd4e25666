"""Result of a cell: the reports of its ranks as arrays, a table, a data frame and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.records import Rows
from nbdist.settings import Settings
from nbdist.views import formatting
from nbdist.views.result_table import require_pandas
from nbdist.views.run.metrics import MetricTable
from nbdist.views.run.summary import Reached, described, titled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import pandas as pd

    from nbdist.records import (
        Checked,
        Compiled,
        Metrics,
        MimeBundle,
        Note,
        Plan,
        RecoveryRecord,
        RunKind,
        RunState,
        StepBegun,
    )
    from nbdist.telemetry.history import Reports


@dataclass(frozen=True, repr=False)
class Summary:
    """Summary of a run.

    Attributes:
        ranks: number of ranks that ran the cell.
        epochs: number of reported epochs.
        steps: number of reported steps.
        seconds: duration of the run; of a run that has not ended, the time of the last report.
        step_s: median time between two steps, in seconds; 0 for fewer than two steps.
        replicas: number of replicas that shared a batch; 0 if the cell was not a step.
        batch: samples in the first global batch; 0 if the cell was not a step.
        compilations: number of compilations of the step.
        recoveries: number of recoveries.
        last: last value of each metric; see `Run.last`.
    """

    ranks: int
    epochs: int
    steps: int
    seconds: float
    step_s: float
    replicas: int
    batch: int
    compilations: int
    recoveries: int
    last: Mapping[str, float]

    def __repr__(self) -> str:
        parts = [formatting.count(self.ranks, "rank")]
        if self.batch:
            parts.append(
                f"{self.batch} samples a batch on {formatting.count(self.replicas, 'replica')}"
            )
        counted = (self.epochs, "epoch"), (self.steps, "step")
        parts += [formatting.count(number, noun) for number, noun in counted if number]
        if self.step_s:
            parts.append(f"{formatting.duration(self.step_s)} a step")
        parts.append(formatting.duration(self.seconds))
        if self.recoveries:
            parts.append(f"recovered {formatting.times(self.recoveries)}")
        parts += [f"{name} {value:.4g}" for name, value in self.last.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Run:
    """Result of a cell.

    Attributes:
        number: number of the cell in the cluster, from 1.
        reports: reports of the ranks in the order of their arrival.
        results: text of the last expression's value, by rank.
        begun: batch and replicas of a step cell; None for other cells.
        checked: result of `--check`; None without it.
        notes: remarks about the run.
        recoveries: recoveries of the run. Earlier reports of repeated steps are superseded: only
            `reports` contains them.
        plan: layout of a step under pjrt; None for other cells.
        compiled: figures of XLA for the first compilation of a step; None for other cells.
        batches: reports of the batches of a `fit`, at regular intervals if there are many. Their
            metrics are running means of the epoch.
        state: state of the run at its end: status, times and error; None without a run.
        evaluate: runs an expression on all ranks of its cluster; None for a stored run.
    """

    number: int
    reports: tuple[Metrics | Rows, ...] = ()
    results: Mapping[int, str] = field(default_factory=dict)
    begun: StepBegun | None = None
    checked: Checked | None = None
    notes: tuple[Note, ...] = ()
    recoveries: tuple[RecoveryRecord, ...] = ()
    plan: Plan | None = None
    compiled: Compiled | None = None
    batches: tuple[Rows, ...] = ()
    state: RunState | None = None
    evaluate: Callable[[str], object] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        """Return the fields to pickle: a copy in another process has no workers."""
        return {**vars(self), "evaluate": None}

    @cached_property
    def metrics(self) -> tuple[Metrics, ...]:
        """All scalars that ranks reported, without superseded ones."""
        found: list[Metrics] = []
        for report in self.reports:
            found += report.unpacked() if isinstance(report, Rows) else (report,)
        if not self.recoveries:
            return tuple(found)
        from nbdist.telemetry.history import without_superseded

        return without_superseded(found, self.recoveries)

    @cached_property
    def _arrays(self) -> Reports:
        from nbdist.telemetry.history import Reports

        return Reports.of(self.reports, self.recoveries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the reported metrics, `loss` first."""
        return tuple(sorted(self._arrays.metrics, key=lambda name: name != "loss"))

    def table(self, name: str = "loss") -> MetricTable:
        """Return one metric by rank and epoch.

        Raises:
            KeyError: no rank reported it. The message contains the reported metrics.
        """
        self._require(name)
        return MetricTable(self.metrics, name, f"{name} by rank")

    def last(self, name: str) -> float:
        """Return the last value of a metric: reduced over the ranks, or the mean of the ranks.

        Raises:
            KeyError: no rank reported it. The message contains the reported metrics.
        """
        self._require(name)
        own: dict[int, float] = {}
        # Without recoveries, no report is superseded: few have to be unpacked.
        for report in reversed(self.metrics if self.recoveries else self.reports):
            latest = report.last() if isinstance(report, Rows) else report
            if name in latest.shared:
                return latest.shared[name]
            if name in latest.own:
                own.setdefault(latest.rank, latest.own[name])
        return sum(own.values()) / len(own)

    @property
    def history(self) -> dict[str, np.ndarray]:
        """All metrics by name, as float64 arrays of shape `(ranks, steps)`.

        The columns are epochs if no steps were reported. Missing values are nan. Values that were
        reduced over the ranks are equal on all ranks.
        """
        return self._arrays.history()

    @property
    def loss(self) -> np.ndarray:
        """The mean loss over the ranks for each step: float64, shape `(steps,)`.

        A value is nan if it is nan on any rank. If a recovery left out ranks, the mean is over the
        ranks that reported.

        Raises:
            KeyError: no loss was reported.
        """
        self._require("loss")
        if any(recovery.workers for recovery in self.recoveries):
            from nbdist.views.run.chart import mean_of_ranks

            return mean_of_ranks(self.history["loss"])
        mean: np.ndarray = self.history["loss"].mean(axis=0)
        return mean

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each report of a rank: rank, epoch, step, time_s and the metrics.

        Raises:
            UsageError: pandas is not installed.
        """
        require_pandas()
        return self._arrays.frame()

    @property
    def summary(self) -> Summary:
        """The summary of the run."""
        begun, arrays = self.begun, self._arrays
        recompiled = {n.text for n in self.notes if n.topic == "compiled" and not n.warning}
        return Summary(
            ranks=len(self.state.workers if self.state else {*arrays.ranks, *self.results}),
            epochs=arrays.epochs,
            steps=arrays.steps,
            seconds=(self.state.seconds if self.state else 0.0) or arrays.seconds,
            step_s=arrays.step_s,
            replicas=begun.replicas if begun else 0,
            batch=begun.batch if begun else 0,
            compilations=1 + len(recompiled) if begun else 0,
            recoveries=len(self.recoveries),
            last={name: self.last(name) for name in self.names},
        )

    def export(self, value: str, folder: str, *, format: str = "") -> None:  # noqa: A002 - the usual name
        """Write a model of the workers as files that load without nbdist: see `nbdist.export`.

        Args:
            value: Name of the model or arrays on the workers, such as `model` or `state.params`.
            folder: New folder for the files, on the host of rank 0.
            format: `keras`, `weights`, `savedmodel`, `safetensors` or `orbax`. Default: `keras` for
                a Keras model, else `safetensors`.

        Raises:
            UsageError: The run is a stored one and has no workers.
            CellError: `nbdist.export` failed on the workers.
        """
        if self.evaluate is None:
            raise UsageError(
                "a stored run has no workers: export its checkpoints by "
                "nbdist.export(CHECKPOINT_FOLDER, FOLDER)"
            )
        export = f'__import__("nbdist").export({value}, {folder!r}, format={format!r})'
        self.evaluate(f"{export} and None")  # None has no output

    def _require(self, name: str) -> None:
        if name not in self.names:
            there = ", ".join(self.names) or "none"
            raise KeyError(f"{name!r} was not reported; reported metrics: {there}")

    @property
    def reached(self) -> Reached:
        """The latest step, epoch and loss."""
        reports = (*self.reports, *self.batches)
        ends = [one.last() if isinstance(one, Rows) else one for one in reports]
        if self.recoveries:
            ends = [*self.metrics, *self._standing_batches()]
        return Reached.of(ends, self.state.kind if self.state else "")

    def _standing_batches(self) -> tuple[Metrics, ...]:
        from nbdist.telemetry.history import without_superseded

        return without_superseded([m for r in self.batches for m in r.unpacked()], self.recoveries)

    def __repr__(self) -> str:
        if self.state is None:
            return f"<nbdist run {self.number}: {self.summary}>"
        return f"<nbdist run {titled(self.state)}: {described(self.state, self.reached)}>"

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        """Return the text, and a chart of the loss or the first metric if it has two points."""
        from nbdist.telemetry.history import Reports

        reports = Reports.of((*self.reports, *self.batches), self.recoveries)
        return picture_of(reports, repr(self), self.state.kind if self.state else "")


def picture_of(reports: Reports, text: str, kind: RunKind) -> MimeBundle:
    """Return a run to display: text, and a picture of its loss, or of another metric.

    Values by step are preferred to those by epoch. In a `fit`, Keras logs by step the mean since
    the start of the epoch.
    """
    import numpy as np

    from nbdist.views.run.chart import Curve, marks, run_bundle

    curves = []
    for part in reports.parts():
        axis, places = part.axis()
        for name, values in part.history().items():
            there = ~np.isnan(values).all(axis=0)
            if there.sum() > 1:
                is_mean = kind == "fit" and axis == "step"
                label = f"{name} (as Keras logs it)" if is_mean else name
                curves.append((name, Curve(label, axis, places[there], values[:, there])))
    _, curve = min(curves, key=lambda one: one[0] != "loss", default=("", None))
    most_bytes = Settings.from_environment().picture_bytes
    return run_bundle(curve, text, marks(reports.recoveries), most_bytes)
