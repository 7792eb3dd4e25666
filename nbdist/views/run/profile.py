"""Result of `--profile`: time of a step on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import formatting, html

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import Profiled

SHOWN_RANKS = 16
_PARTS = ("rank", "step", "compute", "collectives", "to device", "to host", "other")
_NO_TOP = "no operations: TensorFlow's profiler does not work here, and `other` is waiting for data"
_TOP = ("operation", "ms per step", "calls per step")


class ProfilePicture:
    """Profile with one row per rank, and the longest operations of the slowest rank.

    Args:
        profiles: profile by rank.
    """

    def __init__(self, profiles: Mapping[int, Profiled]) -> None:
        traced = [profile for _, profile in sorted(profiles.items()) if profile.steps]
        # Steps take equally long on all ranks, so the slowest rank waits least for others.
        self._traced = sorted(traced, key=lambda profile: profile.collective_s)

    def _title(self) -> str:
        if not self._traced:
            return (
                "--profile: no steps traced: the run ended during its warm-up, or another trace "
                "was active"
            )
        steps = formatting.count(self._traced[0].steps, "step")
        return f"--profile: {steps} traced; milliseconds per step"

    def _parts(self) -> list[list[str]]:
        shown = sorted(self._traced[:SHOWN_RANKS], key=lambda profile: profile.rank)
        return [
            [
                str(p.rank),
                *(
                    f"{1000 * seconds:.2f}"
                    for seconds in (
                        p.step_s,
                        p.compute_s,
                        p.collective_s,
                        p.to_device_s,
                        p.to_host_s,
                        p.other_s,
                    )
                ),
            ]
            for p in shown
        ]

    def _top(self) -> list[list[str]]:
        return [[o.name, f"{1000 * o.seconds:.3f}", f"{o.count:.3g}"] for o in self._traced[0].top]

    def _rest(self) -> list[str]:
        hidden = len(self._traced) - SHOWN_RANKS
        more = [f"and {formatting.count(hidden, 'rank')} that waited longer"] if hidden > 0 else []
        folders = [p.folder for p in self._traced if p.folder]
        return [
            *more,
            *(f"trace of rank {p.rank}: {p.folder}" for p in self._traced[:1] if folders),
        ]

    def html(self) -> str:
        if not self._traced:
            return html.box(self._title())
        parts = html.table(_PARTS, self._parts(), range(len(_PARTS)))
        top = html.table(_TOP, self._top(), (1, 2)) if self._traced[0].top else ""
        rest = [html.line(text) for text in self._rest()]
        return html.box(self._title(), parts, html.line(self._above_top()), top, *rest)

    def lines(self) -> list[str]:
        if not self._traced:
            return [self._title()]
        parts = html.text_table(_PARTS, self._parts(), range(len(_PARTS)))
        top = html.text_table(_TOP, self._top(), (1, 2)) if self._traced[0].top else []
        return [self._title(), *parts, self._above_top(), *top, *self._rest()]

    def _above_top(self) -> str:
        slowest = self._traced[0]
        return f"longest on rank {slowest.rank}:" if slowest.top else _NO_TOP
