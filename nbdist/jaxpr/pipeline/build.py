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
from jax.extend.core import ClosedJaxpr, Literal, Var

from nbdist.errors import PlanError
from nbdist.jaxpr.flatten import flat, make
from nbdist.jaxpr.microbatches import Rows
from nbdist.jaxpr.pipeline.layer_scans import check_has_scan, over_layers, read
from nbdist.jaxpr.pipeline.loss_section import divide_step, without_early_barriers
from nbdist.jaxpr.pipeline.one_f_one_b import AlternatingPipeline, LossSection
from nbdist.jaxpr.pipeline.scan_pipeline import Pipeline
from nbdist.jaxpr.pipeline.schedule import (
    Interleaved,
    Schedule,
    Skewed,
    constrains_axis,
    inner_equations,
    parts_of,
)
from nbdist.jaxpr.pipeline.stages import RowInvariant
from nbdist.jaxpr.planner_model import of_rows
from nbdist.jaxpr.remat_scans import scan_of
from nbdist.planner.graph.pipeline_schedule import layers_fault, rounds_fault, rows_fault
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
) -> ClosedJaxpr:
    """Return the same step with its scans over layers as pipelines over the mesh axis `stage`.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        stages: number of stages, which divides the layers of each scan.
        micro: number of microbatches, which divides the batch.
        staging: schedule and rounds.

    Raises:
        PlanError: the step has no scan over layers, or a number does not divide.
    """
    program, is_1f1b = flat(closed), staging.schedule == "1f1b"
    if is_1f1b:
        program = without_early_barriers(program, inputs)
    batch = _batch(program, inputs)
    _check(rows_fault(batch, micro))
    if staging.rounds > 1:
        _check(rounds_fault(stages, micro))
    equations = inner_equations(program.jaxpr)
    if is_1f1b:  # the loss section runs on microbatches, too
        equations = chain(equations, program.jaxpr.eqns)
    parts = 1 if any(constrains_axis(eqn, DATA) for eqn in equations) else parts_of(batch, micro)
    rows = Rows(of_rows(program, inputs), batch, micro * parts)
    layers = _layers(program, inputs, rows)
    for one in layers.values():
        _check(layers_fault(one.length, stages, staging.rounds))
    kind = _OneForwardOneBackwardStep if is_1f1b else _GpipeStep
    made = kind(program, layers, Schedule(rows, stages, parts, staging.rounds))
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(made.run)(*given)


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
    """Return the number of layers of each scan over layers; stages must divide all of them.

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
    """

    def __init__(self, program: ClosedJaxpr, layers: dict[int, Layers], schedule: Schedule) -> None:
        self._program, self._layers, self._schedule = program, layers, schedule
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

    def _scan_inputs(self, scan: Scan) -> list[Any]:
        """Return the inputs of a scan over layers; None for values that are not computed yet."""
        constants, carried, over = scan.parts(scan.eqn.invars)
        values = self._values
        return [
            *(self._constant(atom) for atom in constants),
            *(
                self._whole(atom) if isinstance(atom, Literal) or atom in values else None
                for atom in carried
            ),
            *(values.get(var) for var in over),
        ]

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
        if isinstance(value, Skewed):
            return self._schedule.unskewed(value, atom)
        if isinstance(value, Interleaved):
            return self._schedule.deinterleaved(value.array, is_sharded=True)
        return value


class _GpipeStep(_PipelinedStep):
    """A step in which all microbatches end the forward pass before one starts backward (GPipe)."""

    def _run(self) -> None:
        plain: list[Any] = []
        for place, eqn in enumerate(self._program.jaxpr.eqns):
            if place in self._layers:
                self._run_equations(plain)
                plain = []
                left = Pipeline(self._layers[place], self._schedule).run(
                    self._scan_inputs(scan_of(eqn))
                )
                self._values.update(zip(eqn.outvars, left, strict=True))
            else:
                plain.append(eqn)
        self._run_equations(plain)


class _OneForwardOneBackwardStep(_PipelinedStep):
    """A step in which each microbatch goes backward right after its forward pass (1F1B)."""

    def _run(self) -> None:
        schedule, values = self._schedule, self._values
        step = divide_step(self._program, self._layers, schedule.rows)
        section = LossSection(step, self._program.jaxpr, schedule)
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
            {n: schedule.entering(array, outs[n]) for n, array in entering.items()},
            [values[var] for var in section.inputs],
            [section.by_microbatch(values[var], var) for var in section.row_inputs],
        )
        self._store(first, forward_stages.sums(left.forward_sums, given))
        self._store(
            second, backward_work.results | backward_stages.sums(left.backward_sums, backward_given)
        )
        outs, rows = second.eqn.outvars, left.backward_rows
        self._store(second, {n: schedule.leaving(array, outs[n]) for n, array in rows.items()})
        values.update(
            zip(section.sums, map(section.total, section.sums, left.loss_sums), strict=True)
        )
        own, last = left.loss_results[: len(section.rows)], left.loss_results[len(section.rows) :]
        values.update({v: schedule.leaving(a, v) for v, a in zip(section.rows, own, strict=True)})
        values.update({v: a[-1] for v, a in zip(section.last, last, strict=True)})
        self._run_equations(step.eqns["after"])

    def _store(self, scan: Scan, left: Arrays) -> None:
        self._values.update({scan.eqn.outvars[n]: array for n, array in left.items()})
