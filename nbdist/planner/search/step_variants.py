"""Variants of a step: with microbatches and with rematerialization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.graph.fusion import fused
from nbdist.planner.graph.layers import blocks_of, stages_of
from nbdist.planner.graph.layout import Layout
from nbdist.planner.graph.one_f_one_b import as_1f1b
from nbdist.planner.graph.optimizer_state import states_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model, Op, Tensor
    from nbdist.records import Remat

REMATS: tuple[Remat, ...] = ("", "selective", "full")
"""Rematerializations, from the least computation to the least memory."""

LARGE = 10**9
"""Entries of a table from which on it is not replicated unless requested: a step reads few of its
rows, and it tends to grow."""


@dataclass(frozen=True)
class Step:
    """A step, and values that all its layouts share.

    Attributes:
        model: the step's model.
        program: its operations, fused.
        states: numbers of carried values that are not parameters.
        large: tables of more than `LARGE` entries that rows are looked up in.
    """

    model: Model
    program: tuple[Op, ...]
    states: frozenset[int]
    large: list[Tensor]

    @cached_property
    def on_tpus(self) -> tuple[Op, ...]:
        """Its operations, fused as compilers for TPUs do."""
        return fused(self.model.ops, self.model.results, into_products=True)

    @cached_property
    def program_1f1b(self) -> tuple[Op, ...]:
        """Its operations with a 1F1B pipeline.

        Raises:
            PlanError: the step does not allow 1F1B.
        """
        return as_1f1b(self.program, self.model)


class Steps:
    """A step, and its variants that take less memory.

    Args:
        model: the step.
        make_variant: makes a model with rematerialization and microbatches. None if there are no
            variants.
        layers: returns the layers of each scan over layers for a rematerialization, as the runtime
            finds them; raises PlanError if one cannot be split into stages. None uses the model.
        check_1f1b: raises PlanError if a variant with rematerialization does not allow 1F1B. None
            uses the model.
        make_staged: makes a model with rematerialization for stages, with scans over its layers;
            returns None if the step has them, raises PlanError if it has no layers. None if stages
            need no other variant.
    """

    why_no_microbatches = ""
    """Reason why the batch cannot run in microbatches; empty if it can, or if not tried."""

    def __init__(
        self,
        model: Model,
        make_variant: Callable[[Remat, int], Model] | None = None,
        layers: Callable[[Remat], tuple[int, ...]] | None = None,
        check_1f1b: Callable[[Remat], None] | None = None,
        make_staged: Callable[[Remat], Model | None] | None = None,
    ) -> None:
        self._make_variant, self._layers, self._check_1f1b = make_variant, layers, check_1f1b
        self._make_staged = make_staged
        self._variants: dict[tuple[Remat, int], Step] = {("", 1): _step(model)}
        self._staged_variants: dict[Remat, Step] = {}
        self._why_no_stages: dict[Remat, str] = {}
        self._why_no_1f1b: dict[Remat, str] = {}
        self.is_fixed = make_variant is None
        self.remats = REMATS[:1] if self.is_fixed else REMATS

    @property
    def plain(self) -> Model:
        """The step without changes."""
        return self._variants["", 1].model

    @cached_property
    def useful(self) -> tuple[Op, ...]:
        """Products and loops of the step without changes: its useful computation."""
        return tuple(op for op in self.plain.ops if op.flops or op.body)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Numbers of stages that its layers allow; empty if they cannot be split."""
        return () if self.why_no_stages() else self._counts("")

    def allows(self, stages: int, rounds: int) -> bool:
        """Return True if stages can have as many blocks of layers as there are rounds.

        Stages with one block may differ by one layer. Several blocks must be equal.
        """
        return stages in self.stages and (rounds == 1 or stages * rounds in self._blocks)

    @cached_property
    def _blocks(self) -> tuple[int, ...]:
        """Numbers of blocks that divide its layers."""
        if self.stacks_layers:
            return ()
        lengths, model = self._lengths(""), self._staged("").model
        return tuple(n for n in blocks_of(model) if not any(size % n for size in lengths))

    @property
    def stacks_layers(self) -> bool:
        """True if its layers are separate arrays, which the step stacks for its stages.

        Raises:
            PlanError: the step has no layers that stages can share.
        """
        return bool(self._staged("").model.stacked)

    def why_no_stages(self, remat: Remat = "") -> str:
        """Return why its layers cannot be split into stages; empty if they can."""
        if remat not in self._why_no_stages:
            self._why_no_stages[remat] = self._find_why_no_stages(remat)
        return self._why_no_stages[remat]

    def why_no_1f1b(self, remat: Remat) -> str:
        """Return why it does not allow 1F1B; empty if it does."""
        if remat not in self._why_no_1f1b:
            try:
                if self._check_1f1b is not None:
                    self._check_1f1b(remat)
                self._staged(remat).program_1f1b  # noqa: B018
                self._why_no_1f1b[remat] = ""
            except PlanError as error:
                self._why_no_1f1b[remat] = str(error)
        return self._why_no_1f1b[remat]

    def _find_why_no_stages(self, remat: Remat) -> str:
        try:
            counts = self._counts(remat)
        except PlanError as error:
            return str(error)
        if counts:
            return ""
        return (
            "there is no scan over layers whose stacked parameters, [layers, ...], the step carries"
        )

    def _counts(self, remat: Remat) -> tuple[int, ...]:
        fewest = min(self._lengths(remat), default=None)
        counts = stages_of(self._staged("").model)
        return tuple(n for n in counts if fewest is None or n <= fewest)

    def _lengths(self, remat: Remat) -> tuple[int, ...]:
        """Return the numbers of layers as the runtime finds them."""
        return () if self._layers is None else self._layers(remat)

    def of(self, layout: Layout) -> Step:
        """Return the variant for a layout; microbatches of a pipeline are not part of it.

        Raises:
            PlanError: the variant is impossible.
        """
        if layout.stage > 1 and self.why_no_stages(layout.remat):
            raise PlanError(f"no stages: {self.why_no_stages(layout.remat)}")
        return self._staged(layout.remat) if layout.stage > 1 else self._whole(layout)

    def _staged(self, remat: Remat) -> Step:
        """Return the variant for stages, with rematerialization."""
        if remat not in self._staged_variants:
            made = None if self._make_staged is None else self._make_staged(remat)
            step = self._whole(Layout(1, 1, remat=remat)) if made is None else _step(made)
            self._staged_variants[remat] = step
        return self._staged_variants[remat]

    def _whole(self, layout: Layout) -> Step:
        """Return the variant for a layout without stages."""
        key = layout.remat, layout.micro
        if key not in self._variants:
            if self._make_variant is None:
                raise PlanError("this step cannot be rewritten for remat or microbatches")
            try:
                self._variants[key] = _step(self._make_variant(*key))
            except PlanError as error:
                raise PlanError(f"no microbatches: {error}") from None
        return self._variants[key]


def _step(model: Model) -> Step:
    program = fused(model.ops, model.results)
    tables = {op.ins[0].number for op in program if op.kind == "lookup"}
    large = [t for t in model.tensors if t.value.number in tables and t.value.size > LARGE]
    return Step(model, program, states_of(model), large)
