"""Where what products make lies: said in the step, where XLA would guess it.

XLA lays out what a step makes by what it is given. Of parameters that are cut over the axis of the
data, so that each device keeps a part of them (ZeRO-3), it may take the cut for that of all that is
made of them: it then gathers the batch in their place, and takes several times the memory. A
product's result is where that is decided: so of each it is said that its rows are cut, and XLA
gathers what is multiplied. Of sums over what the model's axis cuts it is said there, if the plan
has it so, that they are cut along the sequence (see `planner/graph/sequence.py`).

Of the gradients of convolutions' kernels it is said that `data` does not cut them: where it cuts
the optimizer's state, XLA for TPUs would make each in a loop over the devices, for which it keeps
the images once more, in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Var

from nbdist.jaxpr.flatten import OPEN, flat, renamed
from nbdist.jaxpr.planner_model import values_of
from nbdist.planner.graph.layout import split_by
from nbdist.planner.graph.sequence import sequence_of
from nbdist.records import DATA, MODEL, STAGE

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


class Lie(NamedTuple):
    """How a step lies on a mesh.

    Attributes:
        mesh: it has axes `data` and, where the sequence is cut, `model`.
        specs: of the first of the step's inputs; the others are cut along their rows alone.
        rows: whether more than rows and the optimizer's state is cut: else XLA guesses these right.
        sequence: whether `model` cuts what products pass on along the sequence.
    """

    mesh: Mesh | AbstractMesh
    specs: Sequence[Spec] = ()
    rows: bool = True
    sequence: bool = False


def with_sharded_products(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], lie: Lie
) -> ClosedJaxpr:
    """The same step, which says of its products how they are cut.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.
        lie: how it lies; over an axis of stages nothing is said of rows: each has its own.
    """
    program = flat(closed)
    model, values = values_of(program, inputs)
    return ClosedJaxpr(_ShardedProducts(model, values, lie).program(program.jaxpr), program.consts)


class _ShardedProducts:
    """A program with the places of what its products make.

    Args:
        model: the step.
        values: what its variables are there.
        lie: how it lies.
    """

    def __init__(self, model: Model, values: Mapping[Var, Value], lie: Lie) -> None:
        self._values, self._mesh = values, lie.mesh
        self._batch = model.batch_groups
        self._rows = frozenset[int]() if STAGE in lie.mesh.shape else self._batch
        self._says_rows = lie.rows
        self._split = split_by(model, lie.specs) - self._batch
        parts = lie.mesh.shape.get(MODEL, 1)
        self._sequence = (
            sequence_of(model, self._split, parts) if lie.sequence else frozenset[int]()
        )

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """A flat program, with those that it holds."""
        names: dict[Var, Var] = {}
        eqns = []
        for eqn in jaxpr.eqns:
            eqns.append(eqn.replace(invars=renamed(eqn.invars, names), params=self._params(eqn)))
            spec = self._spec(eqn) if eqn.primitive.name in _PRODUCTS else None
            if spec is not None:
                (made,) = eqn.outvars
                names[made] = Var(made.aval)
                eqns.append(self._constraint(eqn, names[made], spec))
        return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))

    def _params(self, eqn: Any) -> dict[str, Any]:
        name, params = eqn.primitive.name, dict(eqn.params)
        if name in OPEN:
            params["jaxpr"] = self.program(params["jaxpr"])
        elif name == "scan":
            params["jaxpr"] = self._closed(params["jaxpr"])
        elif name == "cond":
            params["branches"] = tuple(map(self._closed, params["branches"]))
        return params

    def _closed(self, program: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self.program(program.jaxpr), program.consts)

    def _spec(self, eqn: Any) -> jax.P | None:
        """How a product's result lies, where that is said; what is open is left to XLA."""
        value = self._values[eqn.outvars[0]]
        if self._batch.isdisjoint(value.groups):
            return self._whole(value) if self._is_gradient_of_kernel(eqn) else None
        if not self._says_rows:
            return None
        along = self._sequence if self._is_sum(eqn, value) else frozenset[int]()
        spec: list[Any] = [_OPEN] * len(value.groups)
        for axis, groups in ((DATA, self._rows), (MODEL, self._split), (MODEL, along)):
            place = next((n for n, group in enumerate(value.groups) if group in groups), -1)
            is_open = axis not in spec and place >= 0
            if is_open and value.sizes[place] % self._mesh.shape[axis] == 0:
                spec[place] = axis
        return None if spec == [_OPEN] * len(spec) else jax.P(*spec)

    def _is_gradient_of_kernel(self, eqn: Any) -> bool:
        """Whether what has no rows is made of two that have; stages have layers of their own."""
        values = (self._values[variable] for variable in eqn.invars)
        all_rows = all(not self._batch.isdisjoint(value.groups) for value in values)
        return eqn.primitive.name == _CONV and all_rows and STAGE not in self._mesh.shape

    def _whole(self, value: Value) -> jax.P:
        """Of what `data` does not cut; what `model` cuts is open."""
        return jax.P(*(_OPEN if group in self._split else None for group in value.groups))

    def _is_sum(self, eqn: Any, made: Value) -> bool:
        """Whether it sums over what the model's axis cuts, and leaves nothing that it does."""
        if eqn.primitive.name != _DOT or not self._split.isdisjoint(made.groups):
            return False
        (dims, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0]
        return any(self._values[left].groups[dim] in self._split for dim in dims)

    def _constraint(self, product: Any, after: Var, spec: jax.P) -> Any:
        """An equation, at the same place of the user's source."""
        (made,) = product.outvars
        aval = made.aval
        sharding = jax.NamedSharding(self._mesh, spec)

        def sharded(array: Any) -> Any:
            return jax.lax.with_sharding_constraint(array, sharding)

        (eqn,) = jax.make_jaxpr(sharded)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns
        return eqn.replace(invars=[made], outvars=[after], source_info=product.source_info)
