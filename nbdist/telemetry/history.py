"""Reports of ranks as arrays: metrics by rank and step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Self

import numpy as np

from nbdist.records import PLACE, Columns, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd

    from nbdist.records import Metrics, RecoveryRecord


_EPOCH, _STEP, _TIME = (PLACE.index(name) for name in ("epoch", "step", "time_s"))


def standing(places: np.ndarray, recoveries: Iterable[RecoveryRecord]) -> np.ndarray:
    """Return a mask of reports that no recovery superseded.

    A recovery supersedes reports of repeated steps, and of epochs with such a step.

    Args:
        places: positions and times of reports: shape (reports, len(PLACE)), float64.
        recoveries: recoveries of the run.

    Returns:
        Shape (reports,), bool.
    """
    epoch, step, time_s = places[:, [_EPOCH, _STEP, _TIME]].T
    stands = np.ones(len(places), bool)
    for recovery in recoveries:
        before = time_s < recovery.time_s
        lost = before & (step > recovery.step)
        of_epochs = (step < 0) & (epoch >= 0)
        stands &= ~(lost | (before & of_epochs & np.isin(epoch, epoch[lost])))
    return stands


def without_superseded(
    metrics: Sequence[Metrics], recoveries: Sequence[RecoveryRecord]
) -> tuple[Metrics, ...]:
    """Return the reports that no recovery superseded, in their order."""
    if not recoveries or not metrics:
        return tuple(metrics)
    places = np.array([(m.rank, m.epoch, m.step, m.time_s) for m in metrics], float)
    return tuple(compress(metrics, standing(places, recoveries)))


@dataclass(frozen=True)
class Reports:
    """Valid reports of all ranks, ordered by time.

    Attributes:
        places: shape (reports, len(PLACE)), float64.
        metrics: by name, shape (reports,), float64, NaN if a report lacks the metric. A rank's own
            value takes precedence over the value reduced over ranks.
        reported: by name, shape (reports,), bool: True if a report contains it, even as NaN.
        recoveries: recoveries of the run.
    """

    places: np.ndarray
    metrics: Mapping[str, np.ndarray]
    reported: Mapping[str, np.ndarray]
    recoveries: Sequence[RecoveryRecord] = ()

    @classmethod
    def of_tables(
        cls, tables: Iterable[tuple[Columns, np.ndarray]], recoveries: Sequence[RecoveryRecord] = ()
    ) -> Self:
        """Create reports from stored rows of shape (rows, len(columns.names))."""
        kept = [(columns, rows) for columns, rows in tables if len(rows)]
        places = [rows[:, : len(PLACE)] for _, rows in kept]
        all_places = np.concatenate([np.empty((0, len(PLACE))), *places])
        names = dict.fromkeys(n for columns, _ in kept for n in (*columns.own, *columns.shared))
        metrics = {name: np.full(len(all_places), np.nan) for name in names}
        reported = {name: np.zeros(len(all_places), bool) for name in names}
        start = 0
        for columns, rows in kept:
            for name, values in _metrics(columns, rows).items():
                metrics[name][start : start + len(rows)] = values
                reported[name][start : start + len(rows)] = True
            start += len(rows)
        order = np.argsort(all_places[:, PLACE.index("time_s")], kind="stable")
        chosen = order[standing(all_places[order], recoveries)]
        return cls(all_places, metrics, reported, recoveries)._chosen(chosen)

    @classmethod
    def of(
        cls, reports: Iterable[Metrics | Rows], recoveries: Sequence[RecoveryRecord] = ()
    ) -> Self:
        """Create reports from records of the ranks."""
        tables: dict[Columns, list[np.ndarray]] = {}
        for report in reports:
            if isinstance(report, Rows):
                columns, values = report.columns, np.frombuffer(report.values, "<f8")
            else:
                columns = Columns(own=tuple(report.own), shared=tuple(report.shared))
                place = (report.rank, report.epoch, report.step, report.time_s)
                values = np.array([*place, *report.own.values(), *report.shared.values()])
            tables.setdefault(columns, []).append(values)
        arrays = [
            (columns, np.concatenate(parts).reshape(-1, len(columns.names)))
            for columns, parts in tables.items()
        ]
        return cls.of_tables(arrays, recoveries)

    @property
    def ranks(self) -> list[int]:
        """Ranks with reports."""
        return [int(rank) for rank in np.unique(self._place("rank"))]

    @property
    def epochs(self) -> int:
        """Number of reported epochs."""
        return _count(self._place("epoch"))

    @property
    def steps(self) -> int:
        """Number of reported steps."""
        return _count(self._place("step"))

    @property
    def seconds(self) -> float:
        """Seconds until the last report."""
        return float(self._place("time_s").max(initial=0.0))

    @property
    def step_s(self) -> float:
        """Median seconds between two steps of a rank, 0 with fewer than two steps.

        Intervals that contain a recovery are not counted.
        """
        rank, _, step, time_s = self.places[self._place("step") >= 0].T
        own = rank == rank[:1]
        times = time_s[own][np.argsort(step[own], kind="stable")]
        part = np.searchsorted(np.sort([recovery.time_s for recovery in self.recoveries]), times)
        intervals = np.diff(times)[np.diff(part) == 0]
        return float(np.median(intervals)) if len(intervals) else 0.0

    def _place(self, name: str) -> np.ndarray:
        column: np.ndarray = self.places[:, PLACE.index(name)]
        return column

    def by_step(self) -> Self:
        """Return the reports of steps, else those of epochs, else all, as those of `evaluate`."""
        for place in ("step", "epoch"):
            rows = self._place(place) >= 0
            if rows.any():
                return self._chosen(rows)
        return self

    def history(self) -> dict[str, np.ndarray]:
        """Return each metric as an array of shape (ranks, steps), float64.

        Rows are ordered by rank, columns by step. Columns are epochs if no steps were reported.
        Missing values are NaN.
        """
        chosen = self.by_step()
        rank, epoch, step = chosen.places[:, :3].T
        ranks, row = np.unique(rank, return_inverse=True)
        where = np.stack([np.maximum(step, 0), epoch, step], axis=1)
        steps, column = np.unique(where, axis=0, return_inverse=True)
        found = {}
        for name in sorted(chosen.metrics, key=lambda name: name != "loss"):
            there = chosen.reported[name]
            if there.any():
                found[name] = np.full((len(ranks), len(steps)), np.nan)
                found[name][row[there], column[there]] = chosen.metrics[name][there]
        return found

    def parts(self) -> Iterator[Self]:
        """Yield the reports of steps, then the others. Leaves out a part without reports."""
        of_steps = self._place("step") >= 0
        for rows in (of_steps, ~of_steps):
            if rows.any():
                yield self._chosen(rows)

    def axis(self) -> tuple[str, np.ndarray]:
        """Return the axis of `history`: its name, and the position of each column."""
        _, epoch, step = self.by_step().places[:, :3].T
        if (step >= 0).any():
            where, name = np.stack([np.maximum(step, 0), epoch, step], axis=1), "step"
            return name, np.unique(where, axis=0)[:, 2]
        return "epoch", np.unique(np.stack([step, epoch], axis=1), axis=0)[:, 1]

    def frame(self) -> pd.DataFrame:
        """Return one row per report: rank, epoch, step, time_s and the metrics.

        A metric with the name of such a column is stored as `rank (reported)` and so on.
        """
        import pandas as pd

        chosen = self.by_step()
        rank, epoch, step, time_s = chosen.places.T
        counts = {"rank": rank, "epoch": epoch, "step": step}
        columns = {name: values.astype(int) for name, values in counts.items()}
        metrics = {
            f"{name} (reported)" if name in PLACE else name: chosen.metrics[name]
            for name in self.history()
        }
        return pd.DataFrame({**columns, "time_s": time_s, **metrics})

    def _chosen(self, rows: np.ndarray) -> Self:
        metrics = {name: values[rows] for name, values in self.metrics.items()}
        reported = {name: there[rows] for name, there in self.reported.items()}
        return type(self)(self.places[rows], metrics, reported, self.recoveries)


def _count(numbers: np.ndarray) -> int:
    """Return the number of distinct values from 0 on."""
    return len(np.unique(numbers[numbers >= 0]))


def _metrics(columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the metric columns of one table."""
    own = len(PLACE) + len(columns.measures)
    shared = own + len(columns.own)
    return {
        **dict(zip(columns.shared, rows[:, shared:].T, strict=True)),
        **dict(zip(columns.own, rows[:, own:shared].T, strict=True)),
    }
