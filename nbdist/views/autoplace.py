"""Measurements and choices of `@autoplace`: a table and bars for each kind of inputs."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

from nbdist.views import formatting, html
from nbdist.views.surface import bundle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from nbdist.records import MimeBundle
    from nbdist.records.autoplace import Decision

SHOWN = 16
"""Number of kinds of inputs in the table, the latest ones."""

DRAWN = 6
WIDTH = 672
"""Width of the picture in CSS pixels. Its resolution is higher, for dense screens."""

_DPI = 192
_BAR = 0.24
_HEAD = 0.75
"""Inches: height of a bar, and of the space above and below the bars."""

_HEADER = ("", "place", "devices", "median", "spread", "rounds", "")
_NUMBERS = (3, 4, 5)
_CHOSEN, _OTHER = "#2f6f9f", "#b8c4ce"
_LETTERS = 90
_ALT_TEXT = "median of each place as a bar, with half the spread on either side"


class AutoplacePicture:
    """Report of a function in a notebook, as text, HTML and a picture.

    Attributes:
        function: name of the function.
        decisions: one decision per kind of inputs, oldest first.
    """

    def __init__(self, function: str, decisions: Sequence[Decision]) -> None:
        self.function = function
        self.decisions = tuple(decisions)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        return bundle(self)

    def html(self) -> str:
        parts = []
        for decision in self._shown():
            parts += [html.line(_inputs(decision)), html.line(_chosen(decision))]
            if decision.timed:
                parts.append(html.table(_HEADER, _rows(decision), _NUMBERS))
            parts += [html.faint(text) for text in _left_out(decision)]
        picture = [html.picture(self.png(), _ALT_TEXT, WIDTH)] if self._drawn() else []
        return html.box(self._title(), *parts, *map(html.line, self._rest()), *picture)

    def lines(self) -> list[str]:
        lines = [self._title()]
        for decision in self._shown():
            lines += ["", _inputs(decision), _chosen(decision)]
            if decision.timed:
                lines += html.text_table(_HEADER, _rows(decision), _NUMBERS)
            lines += _left_out(decision)
        return lines + self._rest()

    def png(self) -> bytes:
        """Draw the latest `DRAWN` kinds: medians as bars, with half the spread on either side."""
        from matplotlib.figure import Figure  # without pyplot: no backend, no global state

        drawn = self._drawn()
        bars = [len(decision.timed) for decision in drawn]
        height = sum(_BAR * number + _HEAD for number in bars)
        figure = Figure(figsize=(WIDTH / 96, height), dpi=_DPI, layout="constrained")
        grid = figure.subplots(len(drawn), squeeze=False, height_ratios=[3 + n for n in bars])
        for axes, decision in zip(grid[:, 0], drawn, strict=True):
            _draw(axes, decision)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    def _title(self) -> str:
        if not self.decisions:
            return f"{self.function}: no measurements yet: call the function"
        kinds = formatting.count(len(self.decisions), "kind")
        return f"{self.function}: {kinds} of inputs"

    def _shown(self) -> Sequence[Decision]:
        return self.decisions[-SHOWN:]

    def _drawn(self) -> Sequence[Decision]:
        return [decision for decision in self.decisions if decision.timed][-DRAWN:]

    def _rest(self) -> list[str]:
        hidden = len(self.decisions) - SHOWN
        return [f"and {formatting.count(hidden, 'older kind')}"] if hidden > 0 else []


def _inputs(decision: Decision) -> str:
    return f"inputs: {decision.inputs}"


def _chosen(decision: Decision) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.made))
    when = f" (measured {made})" if decision.timed else ""
    return f"chosen: {decision.chosen}, {decision.why}{when}"


def _rows(decision: Decision) -> list[list[str]]:
    return [
        [
            "✓" if one.name == decision.chosen else "",
            one.name,
            one.words,
            formatting.duration(one.median_s),
            formatting.duration(one.spread_s),
            str(one.rounds),
            one.note,
        ]
        for one in decision.timed
    ]


def _left_out(decision: Decision) -> list[str]:
    return [f"excluded: {left.name}: {left.why}" for left in decision.left_out]


def _draw(axes: Axes, decision: Decision) -> None:
    names = [one.name for one in decision.timed]
    colours = [_CHOSEN if name == decision.chosen else _OTHER for name in names]
    medians = [1000 * one.median_s for one in decision.timed]
    halves = [min(500 * one.spread_s, 1000 * one.median_s) for one in decision.timed]
    axes.barh(names, medians, color=colours, xerr=halves, ecolor="0.25", capsize=2)
    for place, one in enumerate(decision.timed):
        axes.annotate(
            formatting.duration(one.median_s),
            (medians[place] + halves[place], place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per call", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    title = formatting.shortened(decision.inputs, _LETTERS).replace("$", r"\$")
    axes.set_title(title, fontsize=8, loc="left")
