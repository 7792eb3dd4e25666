"""Pallas kernels in a step that is sharded: each device runs a kernel on its own rows and heads.

XLA does not split a kernel. It would gather all inputs and run the whole grid on each device, or
refuse the program. So each call is put into a `jax.shard_map` over the mesh axes that shard it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr

from nbdist.jaxpr.flatten import flat, with_bodies
from nbdist.jaxpr.pallas_calls import NAME, in_context, split_axes, with_parts
from nbdist.jaxpr.planner_model import values_of
from nbdist.planner.graph.layout import split_by
from nbdist.records import MODEL, batch_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.extend.core import Jaxpr, Var
    from jax.sharding import AbstractMesh, Mesh

    from nbdist.jaxpr.pallas_calls import SplitAxis
    from nbdist.planner.graph.model import Role, Value
    from nbdist.records import Spec


def with_sharded_kernels(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    mesh: Mesh | AbstractMesh,
    specs: Sequence[Spec],
) -> ClosedJaxpr:
    """Return the same step, whose kernels run on the shards of each device.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        mesh: with the axes of the batch and, if the model is sharded, `model`.
        specs: specs of the step's first inputs; the others are sharded by rows only.
    """
    program = flat(closed)
    model, values = values_of(program, inputs)
    rows = batch_axes(mesh.shape)
    made = _ShardedKernels(
        mesh,
        {rows: model.batch_groups, (MODEL,): split_by(model, specs) - model.batch_groups},
        values,
    )
    return ClosedJaxpr(made.program(program.jaxpr), program.consts)


class _ShardedKernels:
    """A program whose kernels are sharded.

    Args:
        mesh: the mesh.
        groups: groups of dimensions that mesh axes shard, by the names of the axes.
        values: the model's value of each variable.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        groups: Mapping[tuple[str, ...], frozenset[int]],
        values: Mapping[Var, Value],
    ) -> None:
        self._mesh, self._values = mesh, values
        self._sizes = {axes: prod(mesh.shape.get(axis, 1) for axis in axes) for axes in groups}
        self._groups = {axes: own for axes, own in groups.items() if self._sizes[axes] > 1}

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a flat program and its inner programs with sharded kernels."""
        eqns = []
        for eqn in jaxpr.eqns:
            params = with_bodies(eqn.primitive.name, eqn.params, self.program)
            axes = self._axes(eqn) if eqn.primitive.name == NAME else {}
            eqns.append(self._sharded(eqn, axes) if axes else eqn.replace(params=params))
        return jaxpr.replace(eqns=eqns)

    def _axes(self, eqn: Any) -> dict[tuple[str, ...], SplitAxis]:
        """Return the grid axes that mesh axes shard, by the names of the mesh axes."""
        found: dict[tuple[str, ...], SplitAxis] = {}
        for axis in split_axes(eqn).axes:
            group = self._values[eqn.outvars[0]].groups[axis.outs[0]]
            for name, groups in self._groups.items():
                if group in groups and name not in found and axis.size % self._sizes[name] == 0:
                    found[name] = axis
        return found

    def _sharded(self, eqn: Any, axes: Mapping[tuple[str, ...], SplitAxis]) -> Any:
        """Return a call on the shards of each device, for the equation of a call."""
        own = with_parts(eqn.params, {axis: self._sizes[n] for n, axis in axes.items()})

        def spec(rank: int, dims: Mapping[tuple[str, ...], int | None]) -> jax.P:
            names = {dim: name for name, dim in dims.items()}
            return jax.P(*(names.get(dim) for dim in range(rank)))

        ins, outs = (
            tuple(
                spec(var.aval.ndim, {name: getattr(axis, side)[n] for name, axis in axes.items()})
                for n, var in enumerate(of_side)
            )
            for side, of_side in (("ins", eqn.invars), ("outs", eqn.outvars))
        )
        run = jax.shard_map(
            lambda *args: eqn.primitive.bind(*args, **own),
            mesh=self._mesh,
            in_specs=ins,
            out_specs=list(outs),
            check_vma=False,
        )
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
        (made,) = jax.make_jaxpr(run)(*avals).eqns
        inner = made.params["jaxpr"]
        (call,) = inner.eqns
        call = call.replace(params=in_context(call.params, call.ctx))
        params = {**made.params, "jaxpr": inner.replace(eqns=[call])}
        return eqn.replace(primitive=made.primitive, params=params, effects=made.effects)
