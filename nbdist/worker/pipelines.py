"""A step whose layers are cut into stages, through which its batch goes in microbatches.

It is done to the step's jaxpr, as in `microbatches` and `rematerialise`: its scans over layers are
run as pipelines, all else as it stands, on the whole batch. The numbers are those of the step as it
is, but for the order of the sums.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxprs_in_params

from nbdist.errors import PlanError
from nbdist.records import DATA
from nbdist.worker.jaxpr_flat import flat, make
from nbdist.worker.jaxpr_model import of_rows
from nbdist.worker.layer_scans import over_layers, read
from nbdist.worker.microbatches import Rows
from nbdist.worker.pipeline_rows import Schedule, Skewed, parts_of
from nbdist.worker.pipeline_ticks import Alike, Pipeline
from nbdist.worker.remat_scans import scan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.plan.model import Role
    from nbdist.worker.layer_scans import Layers
    from nbdist.worker.remat_scans import Scan


def piped(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], stages: int, micro: int
) -> ClosedJaxpr:
    """The same step, with its scans over layers as pipelines over the mesh's axis `stage`.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.
        stages: how many; the layers of each scan divide by it.
        micro: in how many microbatches the batch goes through them; the batch divides by it.

    Raises:
        PlanError: there are no layers that could be cut so, or they do not divide.
    """
    program = flat(closed)
    batch = _batch(program, inputs)
    _check("rows", batch, "microbatches", micro)
    parts = 1 if _lays_out(program.jaxpr) else parts_of(batch, micro)
    rows = Rows(of_rows(program, inputs), batch, micro * parts)
    layers = _layers(program, inputs, rows)
    for one in layers.values():
        _check("layers", one.length, "stages", stages)
    made = _Piped(program, layers, Schedule(rows, stages, parts))
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(made.run)(*given)


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


def _lays_out(jaxpr: Jaxpr) -> bool:
    """Whether loops of it say how arrays are cut over the axis of the data, or may say so."""
    return any(
        any(map(_names_data, body.eqns)) or _lays_out(body)
        for eqn in jaxpr.eqns
        for body in jaxprs_in_params(eqn.params)
    )


def _names_data(eqn: Any) -> bool:
    if eqn.primitive.name != "sharding_constraint":
        return False
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, jax.NamedSharding):
        return True
    return any(axes == DATA or (isinstance(axes, tuple) and DATA in axes) for axes in sharding.spec)


def _check(what: str, number: int, parts: str, wanted: int) -> None:
    """Raises where it does not divide."""
    if number % wanted:
        fitting = ", ".join(str(n) for n in range(2, number + 1) if number % n == 0)
        raise PlanError(f"{number} {what} do not divide into {wanted} {parts}: take {fitting or 1}")


class _Piped:
    """A step, with pipelines in it.

    Args:
        program: the step, flat.
        layers: its scans over layers, by their places.
        schedule: of the ticks.
    """

    def __init__(self, program: ClosedJaxpr, layers: dict[int, Layers], schedule: Schedule) -> None:
        self._program, self._layers, self._schedule = program, layers, schedule
        self._makers = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}

    def run(self, *args: Any) -> list[Any]:
        """The step."""
        jaxpr = self._program.jaxpr
        there: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        there |= dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        read = partial(self._whole, there=there)
        plain: list[Any] = []
        for place, eqn in enumerate(jaxpr.eqns):
            if place in self._layers:
                make(jaxpr, plain, there, read)
                plain = []
                pipeline = Pipeline(self._layers[place], self._schedule)
                left = pipeline.run(self._given(scan_of(eqn), there))
                there.update(zip(eqn.outvars, left, strict=True))
            else:
                plain.append(eqn)
        make(jaxpr, plain, there, read)
        return [self._whole(atom, there) for atom in jaxpr.outvars]

    def _given(self, scan: Scan, there: dict[Var, Any]) -> list[Any]:
        """What a scan over layers is given."""
        constants, carried, over = scan.parts(scan.eqn.invars)
        return [
            *(self._constant(atom, there) for atom in constants),
            *(self._whole(atom, there) for atom in carried),
            *(there[var] for var in over),
        ]

    def _constant(self, atom: Any, there: dict[Var, Any]) -> Any:
        """What is repeated for each row is needed for a microbatch alone."""
        rows = self._schedule.rows
        eqn = None if isinstance(atom, Literal) else self._makers.get(atom)
        if eqn is None or atom not in rows.dims or eqn.primitive.name != "broadcast_in_dim":
            return self._whole(atom, there)
        (source, *_), dims = eqn.invars, eqn.params["broadcast_dimensions"]
        if not isinstance(source, Literal) and source in rows.dims:
            return self._whole(atom, there)
        value = self._whole(source, there)
        return Alike(jax.lax.broadcast_in_dim(value, rows.shape(atom), dims))

    def _whole(self, atom: Any, there: dict[Var, Any]) -> Any:
        """A value as the step has it."""
        if isinstance(atom, Literal):
            return atom.val
        if isinstance(there[atom], Skewed):
            return self._schedule.whole(there[atom], atom)
        return there[atom]
