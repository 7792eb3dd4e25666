"""What products reach of what the processor and the memory allow, as a picture.

The model is Williams, Waterman and Patterson's, "Roofline: an insightful visual performance model
for multicore architectures", 2009.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from nbdist.records import Bench, Product

_INCHES = 7.0, 3.6
_DPI = 160
_MEMORY_BOUND = 30
"""So far to the left of all that is drawn the slope begins: most of a step is there."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}


def intensity(product: Product) -> float:
    """Operations for each byte: 2 n^3, of three matrices of n^2 elements that are moved once."""
    return 2 * product.size / (3 * _BYTES[product.dtype])


def roofline(bench: Bench) -> bytes:
    """Products by their intensity, under the roof of their type and the slope of the memory.

    The roofs are the best that was measured, not the maker's peaks.

    Returns:
        A PNG.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend, no state
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    by_type: dict[str, list[Product]] = {}
    for product in bench.products:
        by_type.setdefault(product.dtype, []).append(product)
    widest = max(map(intensity, bench.products)) * 2
    for dtype, products in by_type.items():
        _draw(axes, dtype, products, bench.bytes_per_s, widest)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations for each byte that is moved",
        ylabel="operations a second",
    )
    for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "FLOP/s")):
        axis.set_major_formatter(EngFormatter(unit))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(
        f"roofline of one of {bench.devices} devices, all at work", fontsize=9, loc="left"
    )
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(
    axes: Axes, dtype: str, products: Sequence[Product], bytes_per_s: float, widest: float
) -> None:
    best = max(product.flops for product in products)
    ridge = best / bytes_per_s
    begin = min(*map(intensity, products), ridge) / _MEMORY_BOUND
    places = [begin, ridge, max(widest, 2 * ridge)]
    roof = [begin * bytes_per_s, best, best]
    (line,) = axes.plot(places, roof, linewidth=1.2)
    axes.plot(
        [intensity(product) for product in products],
        [product.flops for product in products],
        _MARKERS[dtype],
        color=line.get_color(),
        ms=4,
        label=f"{dtype}: {formatting.flops(best)}, ridge at {ridge:.3g} operations for a byte",
    )
