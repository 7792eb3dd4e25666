"""Charts of a metric as pictures, for saved notebooks."""

from __future__ import annotations

import io
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nbdist.records import MimeBundle, RecoveryRecord

MANY_RANKS = 16
CHART_WIDTH = 672
"""Width in CSS pixels. The resolution is higher, for dense screens."""

_RESOLUTIONS = (144, 96, 72)
"""Dots per inch of a picture, from the best to the smallest."""

_LEGEND_LETTERS = 100
"""Width of the legend in letters."""

_SIGN_LETTERS = 6
"""Width of the sign before a label of the legend, in letters."""

_GREYS = (1.0, 0.93, 0.8, 0.6, 0.4, 0.2, 0.0)
_TINTS = (1.0, 0.5)
"""Strengths of the colour of a line, in the line and at its edge."""

_NAMED_MARKS = 3
_MARK_LETTERS = 110


@dataclass(frozen=True)
class Mark:
    """Event in a run.

    Attributes:
        after: last step before the event.
        text: description.
    """

    after: int
    text: str


@dataclass(frozen=True)
class Curve:
    """One metric of a run.

    Attributes:
        name: name of the metric.
        axis: meaning of `places`: step, epoch or report.
        places: positions on the axis, shape (places,).
        values: shape (ranks, places), NaN for missing values.
    """

    name: str
    axis: str
    places: np.ndarray
    values: np.ndarray

    def words(self) -> str:
        """Describe the curve, as alternative text of its picture."""
        import numpy as np

        mean = mean_of_ranks(self.values)
        known = np.flatnonzero(~np.isnan(mean))
        parts = [
            f"{self.name} of {formatting.count(len(self.values), 'rank')}",
            f"{self.axis} {self.places[0]:,.0f} to {self.places[-1]:,.0f}",
        ]
        if len(known):
            parts.append(f"mean from {mean[known[0]]:.4g} to {mean[known[-1]]:.4g}")
        return ", ".join(parts)


def marks(recoveries: Iterable[RecoveryRecord]) -> tuple[Mark, ...]:
    """Return the marks of recoveries on an axis of steps."""
    return tuple(Mark(one.step, formatting.recovered(one)) for one in recoveries)


def run_bundle(
    curve: Curve | None, text: str, marked: Sequence[Mark], most_bytes: int
) -> MimeBundle:
    """Return a run to display: text, and a picture of a metric with at least two points.

    The picture is in HTML, because nbconvert has no alternative text for `image/png`.

    Args:
        curve: the metric; None if there is none.
        text: text form of the run.
        marked: events in the run.
        most_bytes: see `Settings.picture_bytes`.
    """
    bundle: MimeBundle = {"text/plain": text}
    if curve is None or curve.values.shape[1] < 2:
        return bundle
    png = line_chart(curve, marked if curve.axis == "step" else (), most_bytes)
    if png:
        picture = html.picture(png, f"Chart of {curve.words()}", CHART_WIDTH)
        bundle["text/html"] = f"<div>{picture}</div>{html.line(text)}"
    return bundle


def line_chart(curve: Curve, marked: Sequence[Mark], most_bytes: int) -> bytes:
    """Draw one line per rank, and their mean.

    Args:
        curve: the metric.
        marked: events, drawn as vertical lines.
        most_bytes: maximum size in base64.

    Returns:
        A PNG; empty if none is small enough.
    """
    figure, axes = _axes(curve.name, curve.axis)
    places, values = curve.places, curve.values
    alike = bool((values == values[:1]).all())
    if not alike:
        for rank, row in enumerate(values):
            label = f"rank {rank}" if len(values) <= MANY_RANKS else None
            axes.plot(places, row, linewidth=0.8, alpha=0.55, label=label)
    label = "all ranks" if alike else "mean"
    axes.plot(places, mean_of_ranks(values), color="black", linewidth=1.6, label=label)
    _draw_marks(figure, axes, marked)
    return _png(figure, axes, most_bytes)


def comparison_chart(runs: Mapping[str, np.ndarray], name: str, most_bytes: int) -> bytes:
    """Draw one line per run: the mean of its ranks.

    Args:
        runs: values by name of the run, shape (ranks, steps), NaN for missing values.
        name: name of the metric.
        most_bytes: maximum size in base64.

    Returns:
        A PNG; empty if none is small enough.
    """
    figure, axes = _axes(name, "step")
    for run, values in runs.items():
        steps, mean = points_of_ranks(values)
        axes.plot(steps, mean, linewidth=1.2, label=run)
    return _png(figure, axes, most_bytes)


def points_of_ranks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return steps from 1 and the mean over ranks at them: two arrays of shape (points,).

    Steps without a value are left out of a metric that most steps lack.

    Args:
        values: shape (ranks, steps), NaN for missing values.
    """
    import numpy as np

    mean = mean_of_ranks(values)
    steps, known = np.arange(1, len(mean) + 1), ~np.isnan(mean)
    return (steps[known], mean[known]) if known.any() and known.mean() < 0.5 else (steps, mean)


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


def _axes(name: str, axis: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no backend, no state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(CHART_WIDTH / 96, 3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=axis, ylabel=_plain(name))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _plain(text: str) -> str:
    """Escape dollars, because Matplotlib would read text between two of them as a formula."""
    return text.replace("$", r"\$")


def _png(figure: Figure, axes: Axes, most_bytes: int) -> bytes:
    """Return a PNG with few colours, because it is several times smaller."""
    from PIL import Image  # Matplotlib depends on it

    _, labels = axes.get_legend_handles_labels()
    column = _SIGN_LETTERS + max(map(len, labels), default=0)
    # Inside the axes, Matplotlib would search for a place, slowly and with a warning.
    columns = max(1, _LEGEND_LETTERS // column)
    figure.legend(loc="outside upper right", fontsize=7, frameon=False, ncols=columns)
    colours = Image.new("P", (1, 1))
    colours.putpalette(_palette(axes))
    for dpi in _RESOLUTIONS:
        drawn, small = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dpi)
        with Image.open(drawn) as image:
            reduced = image.convert("RGB").quantize(palette=colours, dither=Image.Dither.NONE)
        reduced.save(small, "png", optimize=True)
        if len(b64encode(small.getvalue())) <= most_bytes:
            return small.getvalue()
    return b""


def _palette(axes: Axes) -> list[int]:
    """Return greys and the colours of the lines on white, as red, green and blue from 0 to 255."""
    from matplotlib.colors import to_rgb

    colours = [(grey, grey, grey) for grey in _GREYS]
    strengths = {to_rgb(line.get_color()): line.get_alpha() or 1.0 for line in axes.get_lines()}
    for colour, strength in strengths.items():
        for tint in _TINTS:
            red, green, blue = (1 - tint * strength * (1 - part) for part in colour)
            colours.append((red, green, blue))
    return [round(255 * part) for colour in colours for part in colour]
