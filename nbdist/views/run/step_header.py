"""Output at the start of a step cell: its split over replicas, and the result of `--check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Checked, Difference, StepBegun

SHOWN_DIFFERENCES = 12
_HEADER = ("value", "shape", "type", "largest difference", "tolerance", "")


def header_lines(begun: StepBegun) -> Iterator[str]:
    """Yield the split of a step cell over replicas as text; nothing for a loop, which notes it."""
    if not begun.batch or not begun.epochs:
        return
    if begun.batch % begun.replicas:
        each = f"all on each of {begun.replicas} replicas"
    else:
        each = f"{begun.batch // begun.replicas} on each of {begun.replicas} replicas"
    data = formatting.count(begun.samples, "sample") if begun.samples >= 0 else "data"
    length = [formatting.count(begun.epochs, "epoch")]
    if begun.steps >= 0:
        length.append(formatting.count(begun.steps, "step"))
    batch = f"{formatting.count(begun.batch, 'sample')} a batch"
    if begun.replicas > 1:
        split = [f"{batch}, {each}", f"{data} {begun.sharding}"]
    else:
        split = [f"{batch} on one replica", data]
    yield "; ".join([*split, ", ".join(length)])
    for rate in begun.rates:
        yield (
            f"learning rate of `{rate.name}`: {rate.before:.4g}, growing to {rate.after:.4g} over "
            f"{rate.warmup_steps:,} steps (times {begun.replicas} replicas)"
        )


class CheckPicture:
    """Values with the largest differences between one replica and all.

    Args:
        checked: result of a rank.
    """

    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def _title(self) -> str:
        wrong = sum(not d.passes for d in self._checked.differences)
        verdict = "the same" if not wrong else f"{wrong} values differ"
        return (
            f"--check: one step of {self._checked.rows} samples on one replica and on "
            f"{self._checked.replicas}: {verdict}"
        )

    def _rows(self) -> list[list[str]]:
        by_size = sorted(self._checked.differences, key=_weight)
        return [_row(d) for d in by_size[:SHOWN_DIFFERENCES]]

    def _rest(self) -> list[str]:
        hidden = len(self._checked.differences) - SHOWN_DIFFERENCES
        more = [f"and {hidden} more values with smaller differences"] if hidden > 0 else []
        return [*more, *self._checked.causes]

    def html(self) -> str:
        rest = "".join(html.line(text) for text in self._rest())
        return html.box(self._title(), html.table(_HEADER, self._rows(), (3, 4)), rest)

    def lines(self) -> list[str]:
        return [self._title(), *html.text_table(_HEADER, self._rows(), (3, 4)), *self._rest()]


def _weight(difference: Difference) -> tuple[bool, bool, float]:
    """Return a sort key: reported values first, then differing ones, then by size."""
    return not difference.reported, difference.passes, -difference.largest


def _row(difference: Difference) -> list[str]:
    shape = " x ".join(map(str, difference.shape)) or "scalar"
    return [
        difference.name,
        shape,
        difference.dtype,
        f"{difference.largest:.1e}",
        f"{difference.tolerance:.0e}",
        "" if difference.passes else "differs",
    ]
