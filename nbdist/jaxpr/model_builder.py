"""Construction of the planner's model from the equations of a program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr, Literal

from nbdist.planner.graph.dims import Dims
from nbdist.planner.graph.fusion import added_up
from nbdist.planner.graph.layers import layers_of
from nbdist.planner.graph.model import Model, Op, Tensor, Value, tables_of
from nbdist.planner.graph.tpu_padding import images_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.planner.graph.model import Group, Kind, Role

    Rule = Callable[["Builder", Any, list[Value]], list[Value]]


class Builder:
    """Values, tied dimensions and operations of a program, collected equation by equation.

    Attributes:
        dims: the dimensions of all values.
        known: the value of each variable.
        unrewritten: reason why nbdist does not rewrite the operations; empty if it does.

    Args:
        rules: the rule of each primitive, by its name.
        unknown: the rule of other primitives.
    """

    def __init__(self, rules: Mapping[str, Rule], unknown: Rule) -> None:
        self._rules, self._unknown = rules, unknown
        self.dims = Dims()
        self.known: dict[Any, Value] = {}
        self.unrewritten = ""
        self._ops: list[Op] = []
        self._count = 0
        self._name = ""
        self._notes: dict[str, None] = {}
        self._unpriced: dict[str, None] = {}
        self._apart = ""
        self._settled: dict[int, Value] = {}
        self._numbers: dict[int, int] = {}

    def given(self, variables: Sequence[Any], inputs: Sequence[tuple[str, Role]]) -> list[Value]:
        """Return the values of the step's inputs; their batch dimensions are tied."""
        values = [
            self.new(var.aval, path) for var, (path, _) in zip(variables, inputs, strict=True)
        ]
        rows = [
            value.groups[0]
            for value, (_, role) in zip(values, inputs, strict=True)
            if role == "batch" and value.sizes
        ]
        for group in rows[1:]:
            self.dims.tie(rows[0], group)
        return values

    def new(self, aval: Any, name: str = "") -> Value:
        """Return a value of this type, whose dimensions are not tied yet."""
        sizes, fresh = tuple(aval.shape), self.dims.fresh
        names = [f"{name} dimension {dim}" if name else "" for dim in range(len(sizes))]
        groups = tuple([fresh(size, own) for size, own in zip(sizes, names, strict=True)])
        self._count += 1
        return Value(self._count, sizes, groups, *_dtype(aval.dtype))

    def outs(self, eqn: Any) -> list[Value]:
        """Return new values of the types of an equation's results."""
        return [self.new(var.aval) for var in eqn.outvars]

    def emit(
        self,
        kind: Kind,
        ins: Sequence[Value],
        outs: Sequence[Value],
        summed: Sequence[int] = (),
        flops: float = 0.0,
        contract: int = 1,
    ) -> None:
        """Add an operation."""
        self._ops.append(
            Op(kind, self._name, tuple(ins), tuple(outs), tuple(summed), flops, contract)
        )

    def note(self, text: str) -> None:
        """Note a part of the program that the model does not describe exactly."""
        self._notes[text] = None

    def leave_unpriced(self, name: str) -> None:
        """Note a primitive whose computing time is unknown."""
        self._unpriced[name] = None

    def part(self, why: str) -> None:
        """Note why the batch and the model cannot both be sharded."""
        self._apart = why

    def inline(self, jaxpr: Any, args: list[Value]) -> list[Value]:
        """Add the equations of a program, and return its results."""
        closed = jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr
        known: dict[Any, Value] = dict(zip(closed.invars, args, strict=True))
        for var in closed.constvars:
            known[var] = self.new(var.aval)

        def value(atom: Any) -> Value:
            return self.new(atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in closed.eqns:
            ins = [value(atom) for atom in eqn.invars]
            self._name = eqn.primitive.name
            outs = self._rules.get(self._name, self._unknown)(self, eqn, ins)
            known.update(zip(eqn.outvars, outs, strict=True))
        self.known |= known
        return [value(atom) for atom in closed.outvars]

    def loop(self, jaxpr: Any, args: list[Value], times: int) -> list[Value]:
        """Add the equations of a program as the body of one loop operation."""
        around, self._ops = self._ops, []
        outs = self.inline(jaxpr, args)
        body, self._ops = tuple(self._ops), around
        self._ops.append(Op("loop", "scan", (), (), times=times, body=body))
        return outs

    def close(
        self,
        ins: Sequence[Value],
        outs: Sequence[Value],
        carried: Sequence[Value] = (),
        over: Sequence[Value] = (),
    ) -> None:
        """Set the inputs and results of the last loop."""
        self._ops[-1] = replace(
            self._ops[-1],
            ins=tuple(ins),
            outs=tuple(outs),
            carried=tuple(carried),
            over=tuple(over),
        )

    def finish(self, tensors: list[Tensor], results: list[Value]) -> Model:
        """Return the model; call this once, when all equations have been added."""
        settled = self.settled

        def every(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple([settled(value) for value in values])

        def op(old: Op) -> Op:
            return Op(
                old.kind,
                old.name,
                every(old.ins),
                every(old.outs),
                tuple([self._group(dim) for dim in old.summed if dim >= 0]),
                old.flops,
                old.contract,
                old.times,
                tuple(map(op, old.body)),
                every(old.carried),
                every(old.over),
            )

        model = Model(
            tensors=tuple(replace(t, value=settled(t.value)) for t in tensors),
            groups=self._groups[1],
            ops=tuple(map(op, self._ops)),
            results=frozenset(value.number for value in results),
            apart=self._apart,
            notes=tuple(self._notes),
            unpriced=tuple(self._unpriced),
        )
        added = added_up(model.ops, model.results)
        return replace(
            model,
            layers=layers_of(model),
            added=added,
            tables=tables_of(model),
            images=images_of(model),
        )

    def settled(self, value: Value) -> Value:
        """Return a value with the final numbers of its groups."""
        found = self._settled.get(value.number)
        if found is None:
            groups = tuple([self._group(dim) for dim in value.groups])
            found = Value(value.number, value.sizes, groups, value.itemsize, value.dtype)
            self._settled[value.number] = found
        return found

    @cached_property
    def _groups(self) -> tuple[dict[int, int], tuple[Group, ...]]:
        return self.dims.groups()

    def _group(self, dim: int) -> int:
        if dim < 0:
            return -1
        found = self._numbers.get(dim)
        if found is None:
            found = self._numbers[dim] = self._groups[0][self.dims.find(dim)]
        return found


@cache
def _dtype(dtype: Any) -> tuple[int, str]:
    """Return the bytes of an element, and the name of its type; numpy finds the name slowly."""
    return dtype.itemsize, str(dtype)
