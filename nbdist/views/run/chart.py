"""Charts of a metric as pictures, for saved notebooks."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nbdist.records import MimeBundle, RecoveryRecord

MANY_RANKS = 16
CHART_WIDTH = 672
"""Width in CSS pixels. The resolution is higher, for dense screens."""

_DPI = 192
_NAMED_MARKS = 3
_MARK_LETTERS = 110


@dataclass(frozen=True)
class Mark:
    """Event in a run.

    Attributes:
        after: number of steps of the picture before the event.
        text: description.
    """

    after: int
    text: str


def marks(after: Iterable[int], recoveries: Iterable[RecoveryRecord]) -> tuple[Mark, ...]:
    """Return the marks of recoveries. Empty for a picture of epochs, which has no `after`."""
    return tuple(
        Mark(a, formatting.recovered(recovery))
        for a, recovery in zip(after, recoveries, strict=False)
    )


def run_bundle(
    history: Mapping[str, np.ndarray], text: str, title: str, marked: Sequence[Mark] = ()
) -> tuple[MimeBundle, MimeBundle]:
    """Return a run to display: text, and a picture of the first metric with more than one step.

    Args:
        history: metrics of shape (ranks, steps), in order of preference.
        text: text form of the run.
        title: title of the picture.
        marked: events in the run.
    """
    drawn = {name: values for name, values in history.items() if values.shape[1] > 1}
    bundle: MimeBundle = {"text/plain": text}
    metadata: MimeBundle = {}
    if drawn:
        name = next(iter(drawn))
        bundle["image/png"] = line_chart(drawn[name], name, title, marked)
        metadata["image/png"] = {"width": CHART_WIDTH}
    return bundle, metadata


def line_chart(values: np.ndarray, name: str, title: str, marked: Sequence[Mark] = ()) -> bytes:
    """Draw one line per rank, and their mean.

    Args:
        values: shape (ranks, steps), NaN for missing values.
        name: name of the metric.
        title: title of the picture.
        marked: events, drawn as vertical lines.

    Returns:
        A PNG.
    """
    import numpy as np

    figure, axes = _axes(name)
    steps = np.arange(1, values.shape[1] + 1)
    alike = bool((values == values[:1]).all())
    if not alike:
        for rank, row in enumerate(values):
            label = f"rank {rank}" if len(values) <= MANY_RANKS else None
            axes.plot(steps, row, linewidth=0.8, alpha=0.55, label=label)
    label = "all ranks" if alike else "mean"
    axes.plot(steps, mean_of_ranks(values), color="black", linewidth=1.6, label=label)
    _draw_marks(figure, axes, marked)
    axes.set_title(_plain(title), fontsize=8, loc="left", wrap=True)
    return _png(figure, axes)


def comparison_chart(runs: Mapping[str, np.ndarray], name: str) -> bytes:
    """Draw one line per run: the mean of its ranks.

    Args:
        runs: values by name of the run, shape (ranks, steps), NaN for missing values.
        name: name of the metric.

    Returns:
        A PNG.
    """
    import numpy as np

    figure, axes = _axes(name)
    for run, values in runs.items():
        mean = mean_of_ranks(values)
        axes.plot(np.arange(1, len(mean) + 1), mean, linewidth=1.2, label=run)
    return _png(figure, axes)


def mean_of_ranks(values: np.ndarray) -> np.ndarray:
    """Return the mean over ranks without NaN: shape (ranks, steps) to (steps,).

    NaN if all values are missing. `numpy.nanmean` would warn in that case.
    """
    import numpy as np

    there = (~np.isnan(values)).sum(axis=0)
    mean: np.ndarray = np.full(values.shape[1], np.nan)
    with np.errstate(invalid="ignore"):  # the sum of both infinities is NaN
        np.divide(np.nansum(values, axis=0), there, out=mean, where=there > 0)
    return mean


def _draw_marks(figure: Figure, axes: Axes, marked: Sequence[Mark]) -> None:
    """Draw vertical lines with signs, and below the chart the texts of the latest marks."""
    if not marked:
        return
    upright, places = axes.get_xaxis_transform(), [mark.after for mark in marked]
    axes.vlines(places, 0, 1, "0.45", (0, (4, 3)), transform=upright, linewidth=0.8, zorder=1)
    axes.plot(places, [1] * len(places), "P", transform=upright, clip_on=False, color="0.25", ms=5)
    named = [formatting.shortened(mark.text, _MARK_LETTERS) for mark in marked[-_NAMED_MARKS:]]
    before = len(marked) - len(named)
    words = [f"recovered {formatting.times(before)} before", *named] if before else named
    text = _plain("\n".join(words))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color="0.25", linespacing=1.4)


def _axes(name: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no backend, no state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(CHART_WIDTH / 96, 3), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=_plain(name))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _plain(text: str) -> str:
    """Escape dollars, because Matplotlib would read text between two of them as a formula."""
    return text.replace("$", r"\$")


def _png(figure: Figure, axes: Axes) -> bytes:
    axes.legend(fontsize=7, frameon=False, ncols=2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
