"""A cell that has run: what its ranks reported, as arrays, a table, a data frame and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.records import Rows
from nbdist.views import formatting
from nbdist.views.result_table import require_pandas
from nbdist.views.run.metrics import MetricTable

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        StepBegun,
    )
    from nbdist.telemetry.history import Reports


@dataclass(frozen=True, repr=False)
class Summary:
    """A run in figures.

    Attributes:
        ranks: how many reported.
        epochs: how many were reported.
        steps: how many were reported.
        seconds: until the last report.
        step_s: seconds between two steps, the median; 0 with fewer than two.
        replicas: how many shared a batch; 0 where the cell was no step.
        batch: samples in the first global batch; 0 where the cell was no step.
        compilations: how often the step was compiled.
        recoveries: how often ranks were lost, and the run went on.
        last: each metric's last value, as `Run.last` has it.
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
        if self.replicas:
            parts.append(
                f"{self.batch} samples a batch on {formatting.count(self.replicas, 'replica')}"
            )
        counted = (self.epochs, "epoch"), (self.steps, "step")
        parts += [formatting.count(number, noun) for number, noun in counted if number]
        if self.step_s:
            parts.append(f"{1000 * self.step_s:.3g} ms a step")
        parts.append(f"{self.seconds:.1f} s")
        if self.recoveries:
            parts.append(f"recovered {formatting.times(self.recoveries)}")
        parts += [f"{name} {value:.4g}" for name, value in self.last.items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Run:
    """A cell that has run.

    Attributes:
        number: counts the cells of the cluster from 1.
        reports: what the ranks reported, in the order it came.
        results: the text of the last expression's value, by rank.
        begun: how a step cell was split; None for other cells.
        checked: what `--check` found, if it was asked for.
        notes: what was worth a line.
        recoveries: how often ranks were lost; what was reported before of later steps is void, and
            is in nothing but `reports`.
        plan: how a step under pjrt was laid out; None for other cells.
        compiled: what XLA says of it, once compiled for the first kind of batch.
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

    @cached_property
    def metrics(self) -> tuple[Metrics, ...]:
        """Every scalar that a rank reported, one report after the other."""
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
        """The metrics that were reported, `loss` first."""
        return tuple(sorted(self._arrays.metrics, key=lambda name: name != "loss"))

    def table(self, name: str = "loss") -> MetricTable:
        """One metric by rank and epoch.

        Raises:
            KeyError: no rank reported it; names those that were reported.
        """
        self._require(name)
        return MetricTable(self.metrics, name, f"{name} by rank")

    def last(self, name: str) -> float:
        """The metric's last value: as reduced over the ranks, or else their mean.

        Raises:
            KeyError: no rank reported it; names those that were reported.
        """
        self._require(name)
        own: dict[int, float] = {}
        # Of a run that was not recovered all reports hold: few have to be unpacked.
        for report in reversed(self.metrics if self.recoveries else self.reports):
            latest = report.last() if isinstance(report, Rows) else report
            if name in latest.shared:
                return latest.shared[name]
            if name in latest.own:
                own.setdefault(latest.rank, latest.own[name])
        return sum(own.values()) / len(own)

    @property
    def history(self) -> dict[str, np.ndarray]:
        """Every metric as an array of shape (ranks, steps), float64.

        Rows are ranks in their order, columns steps in theirs; epochs where no steps were
        reported. A value that was not reported is nan; one that was reduced over the ranks is the
        same on all.
        """
        return self._arrays.history()

    @property
    def loss(self) -> np.ndarray:
        """The loss of every step, averaged over ranks: shape (steps,), float64.

        Where ranks were left out in between, over those that there were; else it is nan where it
        is on any rank.

        Raises:
            KeyError: none was reported.
        """
        self._require("loss")
        if any(recovery.workers for recovery in self.recoveries):
            from nbdist.views.run.chart import mean_of_ranks

            return mean_of_ranks(self.history["loss"])
        mean: np.ndarray = self.history["loss"].mean(axis=0)
        return mean

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each report of a rank: rank, epoch, step, time_s and the metrics.

        Raises:
            UsageError: pandas is not installed.
        """
        require_pandas()
        return self._arrays.frame()

    @property
    def summary(self) -> Summary:
        """The run in figures."""
        begun, arrays = self.begun, self._arrays
        anew = {n.text for n in self.notes if n.topic == "compiled" and not n.warning}
        return Summary(
            ranks=len(set(arrays.ranks) | self.results.keys()),
            epochs=arrays.epochs,
            steps=arrays.steps,
            seconds=arrays.seconds,
            step_s=arrays.step_s,
            replicas=begun.replicas if begun else 0,
            batch=begun.batch if begun else 0,
            compilations=1 + len(anew) if begun else 0,
            recoveries=len(self.recoveries),
            last={name: self.last(name) for name in self.names},
        )

    def _require(self, name: str) -> None:
        if name not in self.names:
            there = ", ".join(self.names) or "none"
            raise KeyError(f"{name!r} was not reported; there are: {there}")

    def __repr__(self) -> str:
        return f"<nbdist run {self.number}: {self.summary}>"

    def _repr_mimebundle_(self, **_: object) -> tuple[MimeBundle, MimeBundle]:
        """Text; a picture of the loss, or else the first metric, where there is a line to draw."""
        from nbdist.views.run.chart import marks, run_bundle

        recovered = marks(self._arrays.recovered_after(), self.recoveries)
        return run_bundle(self.history, repr(self), str(self.summary), recovered)
