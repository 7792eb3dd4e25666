"""Rewriting of a step as a pipeline: its layers in stages, its batch in microbatches.

The rewriting changes the step's jaxpr, as in `microbatches` and `remat`. Scans over layers run as
pipelines; everything else runs unchanged on the whole batch. The results are those of the step,
except for the order of sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var

from nbdist.errors import PlanError
from nbdist.jaxpr.flatten import flat, inner_equations, make
from nbdist.jaxpr.microbatches import Rows
from nbdist.jaxpr.pipeline.layer_rolling import with_layer_scans
from nbdist.jaxpr.pipeline.layer_scans import (
    NoScanError,
    check_has_scan,
    over_layers,
    read,
)
from nbdist.jaxpr.pipeline.loss_section import divide_step, without_early_barriers
from nbdist.jaxpr.pipeline.one_f_one_b import AlternatingPipeline, LossSection
from nbdist.jaxpr.pipeline.scan_pipeline import Pipeline
from nbdist.jaxpr.pipeline.schedule import (
    Interleaved,
    Schedule,
    Skewed,
    StageRows,
    constrains_axis,
    of_stage,
    parts_of,
)
from nbdist.jaxpr.pipeline.stage_values import StageValue, reads_stage, run_on_stages
from nbdist.jaxpr.pipeline.stages import RowInvariant
from nbdist.jaxpr.planner_model import of_rows
from nbdist.jaxpr.remat_scans import scan_of
from nbdist.planner.graph.pipeline_schedule import (
    SEPARATE_ROUNDS,
    rounds_fault,
    rows_fault,
    stages_fault,
)
from nbdist.records import DATA, GPIPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.remat_scans import Scan
    from nbdist.planner.graph.model import Role
    from nbdist.records import Staging


def as_pipeline(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    stages: int,
    micro: int,
    staging: Staging = GPIPE,
    *,
    stacks_layers: bool = False,
) -> ClosedJaxpr:
    """Return the same step with its scans over layers as pipelines over the mesh axis `stage`.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        stages: number of stages. In several rounds, their blocks divide the layers of each scan.
        micro: number of microbatches, which divides the batch.
        staging: schedule and rounds.
        stacks_layers: True if the step stacks separate layers, as `for_stages` makes it.

    Raises:
        PlanError: the step has no scan over layers, or a number does not fit.
    """
    program, is_1f1b = flat(closed), staging.schedule == "1f1b"
    is_alone = staging.loss_stages == "last"
    if is_1f1b or is_alone:
        program = without_early_barriers(program, inputs)
    batch = _batch(program, inputs)
    _check(rows_fault(batch, micro))
    if staging.rounds > 1:
        _check(SEPARATE_ROUNDS if stacks_layers else rounds_fault(stages, micro))
    equations = inner_equations(program.jaxpr)
    if is_1f1b or is_alone:  # the loss section runs on microbatches, too
        equations = chain(equations, program.jaxpr.eqns)
    parts = 1 if any(constrains_axis(eqn, DATA) for eqn in equations) else parts_of(batch, micro)
    rows = Rows(of_rows(program, inputs), batch, micro * parts)
    layers = _layers(program, inputs, rows)
    for one in layers.values():
        _check(stages_fault(one.length, stages, staging.rounds))
    kind = _OneForwardOneBackwardStep if is_1f1b else _GpipeStep
    schedule = Schedule(rows, stages, parts, staging.rounds, stacks_layers)
    made = kind(program, layers, schedule, is_alone=is_alone)
    is_batch = [is_alone and role == "batch" for _, role in inputs]

    def run(*args: Any) -> list[Any]:
        given = zip(args, is_batch, strict=True)
        return made.run(*(schedule.on_all_stages(a) if is_own else a for a, is_own in given))

    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(run)(*given)


def for_stages(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> ClosedJaxpr:
    """Return the step with its layers in scans: itself, unless it applies them one by one.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.

    Raises:
        PlanError: the step has no layers that stages can share.
    """
    try:
        layers_of(closed, inputs)
    except NoScanError:
        made = with_layer_scans(closed, inputs)
        if made is None:
            raise
        return made
    return closed


def check_1f1b(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> None:
    """Check that microbatches can start their backward pass before all have ended the forward pass.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.

    Raises:
        PlanError: the step does not allow 1F1B, or has no scan over layers.
    """
    program = without_early_barriers(flat(closed), inputs)
    rows = Rows(of_rows(program, inputs), _batch(program, inputs), 1)
    divide_step(program, _layers(program, inputs, rows), rows)


def layers_of(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> tuple[int, ...]:
    """Return the number of layers of each scan over layers.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.

    Raises:
        PlanError: the step has no scan over layers.
    """
    check_has_scan(closed.jaxpr)  # much faster than the analysis of rows
    program = flat(closed)
    rows = Rows(of_rows(program, inputs), _batch(program, inputs), 1)
    return tuple(one.length for one in _layers(program, inputs, rows).values())


def _batch(program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> int:
    """Return the number of rows of the batch."""
    shapes = [
        var.aval.shape
        for var, (_, role) in zip(program.jaxpr.invars, inputs, strict=True)
        if role == "batch"
    ]
    return max((shape[0] for shape in shapes if shape), default=1)


def _layers(
    program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], rows: Rows
) -> dict[int, Layers]:
    """Return the scans over layers, by their positions in the program."""
    found = over_layers(program, inputs, rows.dims)
    return {place: read(scan, rows) for place, scan in found.items()}


def _check(fault: str) -> None:
    if fault:
        raise PlanError(fault)


class _PipelinedStep(ABC):
    """A step that runs its scans over layers as pipelines.

    Args:
        program: the step, flat.
        layers: its scans over layers, by their positions.
        schedule: schedule of the pipeline.
        is_alone: True if the last stage computes the loss section alone.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        layers: dict[int, Layers],
        schedule: Schedule,
        *,
        is_alone: bool,
    ) -> None:
        self._program, self._layers, self._schedule = program, layers, schedule
        self._is_alone = is_alone
        self._equations = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}
        self._values: dict[Var, Any] = {}

    def run(self, *args: Any) -> list[Any]:
        """Run the step."""
        jaxpr = self._program.jaxpr
        self._values = dict(zip(jaxpr.invars, args, strict=True))
        self._values |= dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        self._run()
        return [self._whole(atom) for atom in jaxpr.outvars]

    @abstractmethod
    def _run(self) -> None:
        """Run all equations, given the inputs."""

    def _run_equations(self, eqns: list[Any]) -> None:
        make(self._program.jaxpr, eqns, self._values, self._whole)

    def _run_last(self, eqns: list[Any]) -> None:
        """Run equations after the layers; those that read rows of one stage may run there."""
        plain: list[Any] = []
        for eqn in eqns:
            if self._is_alone and reads_stage(eqn, self._values):
                self._run_equations(plain)
                plain = []
                run_on_stages(self._program.jaxpr, eqn, self._values, self._whole, self._schedule)
            else:
                plain.append(eqn)
        self._run_equations(plain)

    def _scan_inputs(self, scan: Scan) -> list[Any]:
        """Return the inputs of a scan over layers; None for values that are not computed yet."""
        constants, carried, over = scan.parts(scan.eqn.invars)
        values = self._values
        return [
            *(self._constant(atom) for atom in constants),
            *(self._carried(atom) for atom in carried),
            *(values.get(var) for var in over),
        ]

    def _carried(self, atom: Any) -> Any:
        """Return a carried input of a scan; None if it is not computed yet."""
        value = None if isinstance(atom, Literal) else self._values.get(atom)
        if isinstance(value, StageRows):
            return value
        return self._whole(atom) if isinstance(atom, Literal) or value is not None else None

    def _constant(self, atom: Any) -> Any:
        """Return a constant input of a scan; of a broadcast value the rows of one microbatch."""
        rows = self._schedule.rows
        eqn = None if isinstance(atom, Literal) else self._equations.get(atom)
        if eqn is None or atom not in rows.dims or eqn.primitive.name != "broadcast_in_dim":
            return self._whole(atom)
        (source, *_), dims = eqn.invars, eqn.params["broadcast_dimensions"]
        if not isinstance(source, Literal) and source in rows.dims:
            return self._whole(atom)
        return RowInvariant(jax.lax.broadcast_in_dim(self._whole(source), rows.shape(atom), dims))

    def _whole(self, atom: Any) -> Any:
        """Return a value in the form that the original step has it."""
        if isinstance(atom, Literal):
            return atom.val
        value = self._values[atom]
        if isinstance(value, StageRows):
            return self._schedule.leaving(value, atom)
        if isinstance(value, StageValue):
            return self._schedule.outside(of_stage(value.array, value.stage), atom)
        if isinstance(value, Skewed):
            return self._schedule.unskewed(value, atom, atom.aval.shape[0])
        if isinstance(value, Interleaved):
            layers = atom.aval.shape[0]
            return self._schedule.deinterleaved(value.array, layers, is_sharded=True)
        return value


class _GpipeStep(_PipelinedStep):
    """A step in which all microbatches end the forward pass before one starts backward (GPipe)."""

    def _run(self) -> None:
        if self._is_alone:
            self._run_divided()
            return
        plain: list[Any] = []
        for place, eqn in enumerate(self._program.jaxpr.eqns):
            if place in self._layers:
                self._run_equations(plain)
                plain = []
                self._run_layers(place)
            else:
                plain.append(eqn)
        self._run_equations(plain)

    def _run_layers(self, place: int) -> None:
        eqn = self._program.jaxpr.eqns[place]
        left = Pipeline(self._layers[place], self._schedule).run(self._scan_inputs(scan_of(eqn)))
        self._values.update(zip(eqn.outvars, left, strict=True))

    def _run_divided(self) -> None:
        """Run the step with its loss section on the last stage, one microbatch at a time."""
        values, (first, second) = self._values, sorted(self._layers)
        step = divide_step(self._program, self._layers, self._schedule.rows)
        section = LossSection(step, self._program.jaxpr, self._schedule, is_alone=True)
        self._run_equations(step.eqns["before"])
        self._run_layers(first)
        self._run_equations(step.eqns["ahead"])
        given = [values[var] for var in section.inputs]
        over = [section.by_microbatch(values[var], var) for var in section.row_inputs]
        outs = self._program.jaxpr.eqns[first].outvars
        passed = {n: values[outs[n]].array for n in step.forward.carried("rows")}

        def microbatch(totals: list[Any], now: tuple[list[Any], Arrays]) -> Any:
            back, totals, results = section(given, totals, *now)
            return totals, (back, results)

        totals, (back, results) = jax.lax.scan(microbatch, section.zeros(), (over, passed))
        values.update(section.results(totals, results))
        values.update({var: section.stage_rows(back[n]) for n, var in step.backward_inputs.items()})
        self._run_layers(second)
        self._run_last(step.eqns["after"])


class _OneForwardOneBackwardStep(_PipelinedStep):
    """A step in which each microbatch goes backward right after its forward pass (1F1B)."""

    def _run(self) -> None:
        schedule, values = self._schedule, self._values
        step = divide_step(self._program, self._layers, schedule.rows)
        section = LossSection(step, self._program.jaxpr, schedule, is_alone=self._is_alone)
        pipeline = AlternatingPipeline(step, section, schedule)
        scans = [scan_of(self._program.jaxpr.eqns[place]) for place in sorted(self._layers)]
        (first, second), (forward_stages, backward_stages) = (
            scans,
            (pipeline.forward, pipeline.backward),
        )
        self._run_equations(step.eqns["before"])
        given = self._scan_inputs(first)
        forward_work = forward_stages.prepare(given)
        self._store(first, forward_work.results)
        self._run_equations(step.eqns["ahead"])
        backward_given = self._scan_inputs(second)
        backward_work = backward_stages.prepare(backward_given, is_late=True)
        entering = {n: given[first.constants + n] for n in forward_stages.passed}
        outs = first.eqn.outvars
        left = pipeline.run(
            forward_work,
            backward_work,
            {
                n: jnp.expand_dims(schedule.entering(array, outs[n]), 1)
                for n, array in entering.items()
            },
            [values[var] for var in section.inputs],
            [section.by_microbatch(values[var], var) for var in section.row_inputs],
        )
        self._store(first, forward_stages.sums(left.forward_sums, given))
        self._store(
            second, backward_work.results | backward_stages.sums(left.backward_sums, backward_given)
        )
        self._store(second, left.backward_rows)
        values.update(section.results(left.loss_sums, left.loss_results))
        self._run_last(step.eqns["after"])

    def _store(self, scan: Scan, left: Arrays) -> None:
        self._values.update({scan.eqn.outvars[n]: array for n, array in left.items()})
