"""A metric of every rank as a picture, for notebooks that are read later."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MANY_RANKS = 16
CHART_WIDTH = 672
"""In CSS pixels; the picture has more, for screens that have."""

_DPI = 192


def line_chart(values: np.ndarray, name: str, title: str) -> bytes:
    """A line for each rank, and the mean.

    Args:
        values: shape (ranks, steps); nan where there is none.
        name: of the metric.
        title: above the picture.

    Returns:
        A PNG.
    """
    import numpy as np
    from matplotlib.figure import Figure  # without pyplot: no backend, no state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(CHART_WIDTH / 96, 3), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, values.shape[1] + 1)
    alike = bool((values == values[:1]).all())
    if not alike:
        for rank, row in enumerate(values):
            label = f"rank {rank}" if len(values) <= MANY_RANKS else None
            axes.plot(steps, row, linewidth=0.8, alpha=0.55, label=label)
    mean = np.nanmean(values, axis=0)
    axes.plot(steps, mean, color="black", linewidth=1.6, label="all ranks" if alike else "mean")
    axes.set(xlabel="step", ylabel=name)
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7, frameon=False, ncols=2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
