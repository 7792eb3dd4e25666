"""A step whose layers are cut into stages, through which its batch goes in microbatches.

It is done to the step's jaxpr, as in `microbatches` and `rematerialise`: its scans over layers are
run as pipelines, all else as it stands, on the whole batch. The numbers are those of the step as it
is, but for the order of the sums.
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
from nbdist.jaxpr.pipeline.layer_scans import over_layers, read
from nbdist.jaxpr.pipeline.loss_section import halves, without_bars
from nbdist.jaxpr.pipeline.one_f_one_b import Alternating, Turn
from nbdist.jaxpr.pipeline.scan_pipeline import Pipeline
from nbdist.jaxpr.pipeline.schedule import Dealt, Schedule, Skewed, inner, names, parts_of
from nbdist.jaxpr.pipeline.stages import Alike
from nbdist.jaxpr.planner_model import of_rows
from nbdist.jaxpr.remat_scans import scan_of
from nbdist.records import DATA, GPIPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.remat_scans import Scan
    from nbdist.planner.graph.model import Role
    from nbdist.records import Staging


def piped(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    stages: int,
    micro: int,
    staging: Staging = GPIPE,
) -> ClosedJaxpr:
    """The same step, with its scans over layers as pipelines over the mesh's axis `stage`.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.
        stages: how many; the layers of each scan divide by it.
        micro: in how many microbatches the batch goes through them; the batch divides by it.
        staging: how they go through the stages.

    Raises:
        PlanError: there are no layers that could be cut so, or they do not divide.
    """
    program, alternates = flat(closed), staging.schedule == "1f1b"
    if alternates:
        program = without_bars(program, inputs)
    batch = _batch(program, inputs)
    _check("rows", batch, "microbatches", micro)
    if staging.rounds > 1 and micro % stages:
        raise PlanError(f"{micro} microbatches are no multiple of the {stages} stages")
    said = inner(program.jaxpr)
    if alternates:  # what is no layer is made of microbatches, too
        said = chain(said, program.jaxpr.eqns)
    parts = 1 if any(names(eqn, DATA) for eqn in said) else parts_of(batch, micro)
    rows = Rows(of_rows(program, inputs), batch, micro * parts)
    layers = _layers(program, inputs, rows)
    for one in layers.values():
        parts_are = "blocks" if staging.rounds > 1 else "stages"
        _check("layers", one.length, parts_are, stages * staging.rounds)
    kind = _Alternated if alternates else _Piped
    made = kind(program, layers, Schedule(rows, stages, parts, staging.rounds))
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(made.run)(*given)


def check_alternates(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> None:
    """Whether microbatches can go back through a step's layers as soon as they have come (1F1B).

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.

    Raises:
        PlanError: they cannot, or there are no layers that could be cut into stages.
    """
    program = without_bars(flat(closed), inputs)
    rows = Rows(of_rows(program, inputs), _batch(program, inputs), 1)
    halves(program, _layers(program, inputs, rows), rows)


def layers_of(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> tuple[int, ...]:
    """How many layers each of a step's scans over layers has: stages divide them all.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.

    Raises:
        PlanError: there are none that could be cut into stages.
    """
    program = flat(closed)
    rows = Rows(of_rows(program, inputs), _batch(program, inputs), 1)
    return tuple(one.length for one in _layers(program, inputs, rows).values())


def _batch(program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> int:
    """Its rows."""
    shapes = [
        var.aval.shape
        for var, (_, role) in zip(program.jaxpr.invars, inputs, strict=True)
        if role == "batch"
    ]
    return max((shape[0] for shape in shapes if shape), default=1)


def _layers(
    program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], rows: Rows
) -> dict[int, Layers]:
    """Its scans over layers, by their places."""
    found = over_layers(program, inputs, rows.dims)
    return {place: read(scan, rows) for place, scan in found.items()}


def _check(what: str, number: int, parts: str, wanted: int) -> None:
    """Raises where it does not divide."""
    if number % wanted:
        fitting = ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)
        raise PlanError(f"{number} {what} do not divide into {wanted} {parts}: take {fitting or 1}")


class _Stepped(ABC):
    """A step, run around its layers.

    Args:
        program: the step, flat.
        layers: its scans over layers, by their places.
        schedule: of the ticks.
    """

    def __init__(self, program: ClosedJaxpr, layers: dict[int, Layers], schedule: Schedule) -> None:
        self._program, self._layers, self._schedule = program, layers, schedule
        self._makers = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}
        self._there: dict[Var, Any] = {}

    def run(self, *args: Any) -> list[Any]:
        """The step."""
        jaxpr = self._program.jaxpr
        self._there = dict(zip(jaxpr.invars, args, strict=True))
        self._there |= dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        self._run()
        return [self._whole(atom) for atom in jaxpr.outvars]

    @abstractmethod
    def _run(self) -> None:
        """All of it, from what is given on."""

    def _make(self, eqns: list[Any]) -> None:
        make(self._program.jaxpr, eqns, self._there, self._whole)

    def _given(self, scan: Scan) -> list[Any]:
        """What a scan over layers is given; None where that is not there."""
        constants, carried, over = scan.parts(scan.eqn.invars)
        return [
            *(self._constant(atom) for atom in constants),
            *(self._whole(atom) if self._is_there(atom) else None for atom in carried),
            *(self._there.get(var) for var in over),
        ]

    def _is_there(self, atom: Any) -> bool:
        return isinstance(atom, Literal) or atom in self._there

    def _constant(self, atom: Any) -> Any:
        """What is repeated for each row is needed for a microbatch alone."""
        rows = self._schedule.rows
        eqn = None if isinstance(atom, Literal) else self._makers.get(atom)
        if eqn is None or atom not in rows.dims or eqn.primitive.name != "broadcast_in_dim":
            return self._whole(atom)
        (source, *_), dims = eqn.invars, eqn.params["broadcast_dimensions"]
        if not isinstance(source, Literal) and source in rows.dims:
            return self._whole(atom)
        return Alike(jax.lax.broadcast_in_dim(self._whole(source), rows.shape(atom), dims))

    def _whole(self, atom: Any) -> Any:
        """A value as the step has it."""
        if isinstance(atom, Literal):
            return atom.val
        value = self._there[atom]
        if isinstance(value, Skewed):
            return self._schedule.whole(value, atom)
        if isinstance(value, Dealt):
            return self._schedule.collected(value.array, is_cut=True)
        return value


class _Piped(_Stepped):
    """One in which all microbatches go through the layers, before any goes back (GPipe)."""

    def _run(self) -> None:
        plain: list[Any] = []
        for place, eqn in enumerate(self._program.jaxpr.eqns):
            if place in self._layers:
                self._make(plain)
                plain = []
                left = Pipeline(self._layers[place], self._schedule).run(self._given(scan_of(eqn)))
                self._there.update(zip(eqn.outvars, left, strict=True))
            else:
                plain.append(eqn)
        self._make(plain)


class _Alternated(_Stepped):
    """One in which each microbatch goes back as soon as it has come through (1F1B)."""

    def _run(self) -> None:
        schedule, there = self._schedule, self._there
        step = halves(self._program, self._layers, schedule.rows)
        turn = Turn(step, self._program.jaxpr, schedule)
        pipeline = Alternating(step, turn, schedule)
        scans = [scan_of(self._program.jaxpr.eqns[place]) for place in sorted(self._layers)]
        (first, second), (forth, back) = scans, (pipeline.there, pipeline.back)
        self._make(step.eqns["before"])
        given = self._given(first)
        work = forth.work(given)
        self._leave(first, work.left)
        self._make(step.eqns["ahead"])
        coming = self._given(second)
        returning = back.work(coming, is_late=True)
        entering = {n: given[first.constants + n] for n in forth.passed}
        outs = first.eqn.outvars
        left = pipeline.run(
            work,
            returning,
            {n: schedule.entering(array, outs[n]) for n, array in entering.items()},
            [there[var] for var in turn.given],
            [turn.fed(there[var], var) for var in turn.over],
        )
        self._leave(first, forth.sums(left.there, given))
        self._leave(second, returning.left | back.sums(left.back, coming))
        outs, rows = second.eqn.outvars, left.returned
        self._leave(second, {n: schedule.leaving(array, outs[n]) for n, array in rows.items()})
        there.update(zip(turn.sums, map(turn.total, turn.sums, left.sums), strict=True))
        own, last = left.others[: len(turn.rows)], left.others[len(turn.rows) :]
        there.update({v: schedule.leaving(a, v) for v, a in zip(turn.rows, own, strict=True)})
        there.update({v: a[-1] for v, a in zip(turn.last, last, strict=True)})
        self._make(step.eqns["after"])

    def _leave(self, scan: Scan, left: Arrays) -> None:
        self._there.update({scan.eqn.outvars[n]: array for n, array in left.items()})
