"""Sharding constraints on results of products, for cases in which XLA would guess wrong.

XLA infers shardings from the step's inputs. If parameters are sharded over the data axis (ZeRO-3),
XLA may then shard everything computed from these parameters. It gathers the batch in place of the
parameters, and needs several times the memory. The results of products decide this. So each result
is constrained to be sharded by rows, and XLA gathers the parameters. With sequence parallelism,
results that are sums over the model axis are sharded along the sequence (see
`planner/graph/sequence.py`).

Gradients of convolution kernels are constrained not to be sharded over `data`. If the optimizer's
state is sharded, XLA for TPUs would compute each gradient in a loop over devices. It would keep the
images once more in another order.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var

from nbdist.jaxpr.flatten import flat, renamed, with_bodies
from nbdist.jaxpr.planner_model import values_of
from nbdist.planner.graph.layout import split_by
from nbdist.planner.graph.sequence import sequence_of
from nbdist.records import MODEL, STAGE, batch_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.extend.core import Jaxpr
    from jax.sharding import AbstractMesh, Mesh

    from nbdist.planner.graph.model import Model, Role, Value
    from nbdist.records import Spec

_OPEN = jax.P.UNCONSTRAINED
_DOT = "dot_general"
_CONV = "conv_general_dilated"
_PRODUCTS = frozenset((_DOT, _CONV))


class MeshLayout(NamedTuple):
    """Layout of a step on a mesh.

    Attributes:
        mesh: with the axes `data` and, if the sequence is sharded, `model`.
        specs: specs of the step's first inputs; the others are sharded by rows only.
        rows: True if more than rows and optimizer state is sharded; XLA infers these two.
        sequence: True if `model` shards results of products along the sequence.
        products: True if products need constraints.
        kernels: True if the step has Pallas kernels, which run on the shards of each device.
    """

    mesh: Mesh | AbstractMesh
    specs: Sequence[Spec] = ()
    rows: bool = True
    sequence: bool = False
    products: bool = True
    kernels: bool = False


def axes_of(spec: jax.P) -> Spec:
    """Return the mesh axes that shard each dimension; none if it is whole or unconstrained."""
    return tuple(
        axes if isinstance(axes, tuple) else () if axes in (None, _OPEN) else (axes,)
        for axes in spec
    )


def with_sharded_products(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], layout: MeshLayout
) -> ClosedJaxpr:
    """Return the same step with constraints on its products.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        layout: layout of the step. With stages, rows are not constrained: each stage has its own.
    """
    program = flat(closed)
    model, values = values_of(program, inputs)
    return ClosedJaxpr(
        _ShardedProducts(model, values, layout).program(program.jaxpr), program.consts
    )


class _ShardedProducts:
    """A program with constraints on its products.

    Args:
        model: the step.
        values: the model's value of each variable.
        layout: layout of the step.
    """

    def __init__(self, model: Model, values: Mapping[Var, Value], layout: MeshLayout) -> None:
        self._values, self._mesh = values, layout.mesh
        self._batch = model.batch_groups
        self._rows = frozenset[int]() if STAGE in layout.mesh.shape else self._batch
        self._shards_rows = layout.rows
        self._split = split_by(model, layout.specs) - self._batch
        parts = layout.mesh.shape.get(MODEL, 1)
        self._sequence = (
            sequence_of(model, self._split, parts) if layout.sequence else frozenset[int]()
        )

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a flat program and its inner programs with constraints."""
        names: dict[Var, Var] = {}
        eqns = []
        for eqn in jaxpr.eqns:
            params = with_bodies(eqn.primitive.name, eqn.params, self.program)
            eqns.append(eqn.replace(invars=renamed(eqn.invars, names), params=params))
            spec = self._spec(eqn) if eqn.primitive.name in _PRODUCTS else None
            if spec is not None:
                (made,) = eqn.outvars
                names[made] = Var(made.aval)
                eqns.append(self._constraint(eqn, names[made], spec))
        return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))

    def _spec(self, eqn: Any) -> jax.P | None:
        """Return the spec of a product's result; None leaves it to XLA."""
        value = self._values[eqn.outvars[0]]
        if self._batch.isdisjoint(value.groups):
            return self._whole(value) if self._is_gradient_of_kernel(eqn) else None
        if not self._shards_rows:
            return None
        along = self._sequence if self._is_sum(eqn, value) else frozenset[int]()
        spec: list[Any] = [_OPEN] * len(value.groups)
        sizes = self._mesh.shape
        rows = batch_axes(sizes)
        for axes, groups in ((rows, self._rows), ((MODEL,), self._split), ((MODEL,), along)):
            place = next((n for n, group in enumerate(value.groups) if group in groups), -1)
            is_open = axes not in spec and place >= 0
            if is_open and value.sizes[place] % prod(sizes[axis] for axis in axes) == 0:
                spec[place] = axes
        return None if spec == [_OPEN] * len(spec) else jax.P(*spec)

    def _is_gradient_of_kernel(self, eqn: Any) -> bool:
        """Return True if a result without rows is computed from two inputs with rows."""
        values = (self._values[variable] for variable in eqn.invars)
        all_rows = all(not self._batch.isdisjoint(value.groups) for value in values)
        return eqn.primitive.name == _CONV and all_rows and STAGE not in self._mesh.shape

    def _whole(self, value: Value) -> jax.P:
        """Return a spec that does not shard over `data` and leaves `model` open."""
        return jax.P(*(_OPEN if group in self._split else None for group in value.groups))

    def _is_sum(self, eqn: Any, made: Value) -> bool:
        """Return True if it sums over dimensions that the model axis shards, and leaves none."""
        if eqn.primitive.name != _DOT or not self._split.isdisjoint(made.groups):
            return False
        (dims, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0]
        return any(self._values[left].groups[dim] in self._split for dim in dims)

    def _constraint(self, product: Any, after: Var, spec: jax.P) -> Any:
        """Return a constraint equation with the source position of a product."""
        (made,) = product.outvars
        aval = made.aval
        sharding = jax.NamedSharding(self._mesh, spec)

        def sharded(array: Any) -> Any:
            return jax.lax.with_sharding_constraint(array, sharding)

        (eqn,) = jax.make_jaxpr(sharded)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns
        return eqn.replace(invars=[made], outvars=[after], source_info=product.source_info)
