"""Transfers between stages in a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.views import formatting, html
from nbdist.views.surface import bundle

if TYPE_CHECKING:
    from nbdist.parallel.pipeline.stage_devices import StagePlace
    from nbdist.records import MimeBundle

_HEADER = ("stage", "function", "devices", "in, from previous", "in, gradients from next")


@dataclass(frozen=True)
class Leg:
    """Transfers from one stage to another.

    Attributes:
        source: sending stage; None for inputs of the call.
        target: receiving stage.
        nbytes: bytes that arrived on the target's devices, for all microbatches.
    """

    source: int | None
    target: int
    nbytes: int


@dataclass(frozen=True)
class Transfers:
    """Transfers of the last call; a table in a notebook.

    Attributes:
        stage_places: devices of each stage.
        legs: transfers in the order of their first use; empty before the first call.
    """

    stage_places: tuple[StagePlace, ...]
    legs: tuple[Leg, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return sum(leg.nbytes for leg in self.legs)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        return bundle(self)

    def html(self) -> str:
        return html.box(self._title, html.table(_HEADER, self._rows(), (0, 3, 4)))

    def lines(self) -> list[str]:
        return [self._title, *html.text_table(_HEADER, self._rows(), (0, 3, 4))]

    @property
    def _title(self) -> str:
        stages = formatting.count(len(self.stage_places), "stage")
        moved = f"{formatting.size(self.nbytes)} moved by the last call"
        return f"nbdist: {stages}, {moved if self.legs else 'not called yet'}"

    def _rows(self) -> list[list[str]]:
        return [
            [
                str(stage_place.number),
                stage_place.function,
                stage_place.where,
                self._arrived(stage_place.number, back=False),
                self._arrived(stage_place.number, back=True),
            ]
            for stage_place in self.stage_places
        ]

    def _arrived(self, stage: int, *, back: bool) -> str:
        legs = [
            leg
            for leg in self.legs
            if leg.target == stage and (leg.source is not None and leg.source > stage) == back
        ]
        return formatting.size(sum(leg.nbytes for leg in legs)) if legs else "-"
