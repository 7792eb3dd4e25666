"""A step as the search lays it out: as it is, or in parts, with activations that are made again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.graph.fusion import fused
from nbdist.planner.graph.layers import stages_of
from nbdist.planner.graph.layout import Layout
from nbdist.planner.graph.one_f_one_b import alternating
from nbdist.planner.graph.optimizer_state import states_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model, Op, Tensor
    from nbdist.records import Remat

REMATS: tuple[Remat, ...] = ("", "selective", "full")
"""From what computes least to what keeps least."""

LARGE = 10**9
"""Entries of a table from which on not every device has all of it, unless that is asked for: few of
its rows are read in a step, and it mostly grows."""


@dataclass(frozen=True)
class Step:
    """A step, and what all its layouts have in common.

    Attributes:
        program: its operations, fused.
        states: numbers of the values that are carried and are no parameters.
        large: tables of more than `LARGE` entries that rows are looked up in.
    """

    model: Model
    program: tuple[Op, ...]
    states: frozenset[int]
    large: list[Tensor]

    @cached_property
    def on_tpus(self) -> tuple[Op, ...]:
        """Its operations, fused as compilers for TPUs do it."""
        return fused(self.model.ops, self.model.results, into_products=True)

    @cached_property
    def alternating(self) -> tuple[Op, ...]:
        """Its operations where microbatches go back as soon as they have come through (1F1B).

        Raises:
            PlanError: they cannot.
        """
        return alternating(self.program, self.model)


class Steps:
    """A step, and the same step with less in memory at a time.

    Args:
        model: the step.
        again: makes a model of it in which the backward pass makes activations again, and the batch
            is gone through in so many parts; None where none can be had.
        layers: of it with activations made again so, how many layers each of its scans over layers
            has, as what runs it finds them; raises PlanError where one cannot be cut into stages.
            None leaves it to the model.
        alternates: of it with activations made again so, raises PlanError where microbatches cannot
            go back through stages as soon as they have come through. None leaves it to the model.
    """

    whole = ""
    """Why its batch cannot be gone through in parts, once that was tried."""

    def __init__(
        self,
        model: Model,
        again: Callable[[Remat, int], Model] | None = None,
        layers: Callable[[Remat], tuple[int, ...]] | None = None,
        alternates: Callable[[Remat], None] | None = None,
    ) -> None:
        self._again, self._layers, self._alternates = again, layers, alternates
        self._made: dict[tuple[Remat, int], Step] = {("", 1): _step(model)}
        self._whole: dict[Remat, str] = {}
        self._waits: dict[Remat, str] = {}
        self.is_fixed = again is None
        self.remats = REMATS[:1] if self.is_fixed else REMATS

    @property
    def plain(self) -> Model:
        """The step as it is."""
        return self._made["", 1].model

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Into how many stages its layers can be cut; none where they cannot be."""
        return () if self.why_whole() else self._counts("")

    def why_whole(self, remat: Remat = "") -> str:
        """Why its layers cannot be cut into stages; empty if they can."""
        if remat not in self._whole:
            self._whole[remat] = self._why_whole(remat)
        return self._whole[remat]

    def why_waiting(self, remat: Remat) -> str:
        """Why no microbatch can go back through stages before all have come; empty if it can."""
        if remat not in self._waits:
            try:
                if self._alternates is not None:
                    self._alternates(remat)
                self.of(Layout(1, 1, remat=remat)).alternating  # noqa: B018
                self._waits[remat] = ""
            except PlanError as error:
                self._waits[remat] = str(error)
        return self._waits[remat]

    def _why_whole(self, remat: Remat) -> str:
        try:
            lengths = () if self._layers is None else self._layers(remat)
        except PlanError as error:
            return str(error)
        if self._counts(remat):
            return ""
        if math.gcd(*lengths) == 1:
            counts = " and ".join(map(str, lengths))
            return f"no number of stages divides all scans over layers, of {counts} layers"
        return (
            "there is no scan over layers whose parameters are, stacked as [layers, ...], what "
            "the step carries"
        )

    def _counts(self, remat: Remat) -> tuple[int, ...]:
        lengths = () if self._layers is None else self._layers(remat)
        fitting = stages_of(self.plain)
        return tuple(n for n in fitting if not any(length % n for length in lengths))

    def of(self, layout: Layout) -> Step:
        """The step as a layout has it; microbatches of a pipeline are none of it.

        Raises:
            PlanError: no such can be had.
        """
        if layout.stage > 1 and self.why_whole(layout.remat):
            raise PlanError(f"no stages: {self.why_whole(layout.remat)}")
        key = layout.remat, layout.micro if layout.stage == 1 else 1
        if key not in self._made:
            if self._again is None:
                raise PlanError("it cannot be written anew")
            try:
                self._made[key] = _step(self._again(*key))
            except PlanError as error:
                raise PlanError(f"no microbatches: {error}") from None
        return self._made[key]


def _step(model: Model) -> Step:
    program = fused(model.ops, model.results)
    tables = {op.ins[0].number for op in program if op.kind == "lookup"}
    large = [t for t in model.tensors if t.value.number in tables and t.value.size > LARGE]
    return Step(model, program, states_of(model), large)
