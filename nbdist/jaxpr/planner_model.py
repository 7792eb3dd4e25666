"""A planner's model of a step, read from its jaxpr: shapes alone, no memory is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval

from nbdist.jaxpr.rules import RULES, unknown
from nbdist.planner.graph.dims import Dims
from nbdist.planner.graph.layers import layers_of
from nbdist.planner.graph.lookup_tables import tables_of
from nbdist.planner.graph.model import Model, Op, Tensor, Value
from nbdist.planner.graph.summed_products import added_up
from nbdist.planner.graph.tpu_padding import images_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.planner.graph.model import Group, Kind, Role

    Nested = Callable[["_Builder", Any, list[Value]], list[Value]]


def model_of(closed: Any, inputs: Sequence[tuple[str, Role]]) -> Model:
    """The model of a step.

    Args:
        closed: `jax.core.ClosedJaxpr`, as `jax.make_jaxpr` and `jit(...).trace(...)` have it.
        inputs: of each of its inputs, the path and the role.
    """
    build = _Builder()
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    values = build.given(closed.jaxpr.invars, inputs)
    needed = [value for value, is_used in zip(values, used, strict=True) if is_used]
    results = build.inline(jaxpr, needed)
    tensors = [
        Tensor(path, role, value, is_used)
        for value, (path, role), is_used in zip(values, inputs, used, strict=True)
    ]
    return build.finish(tensors, results)


def of_rows(closed: Any, inputs: Sequence[tuple[str, Role]]) -> dict[Any, tuple[int, ...]]:
    """The variables of a step that have dimensions of the batch's, and which these are.

    Args:
        closed: its jaxpr, in which each variable is set in one place.
        inputs: of each of its inputs, the path and the role.
    """
    model, values = values_of(closed, inputs)
    batch = model.batch_groups
    found = {
        var: tuple(dim for dim, group in enumerate(value.groups) if group in batch)
        for var, value in values.items()
    }
    return {var: dims for var, dims in found.items() if dims}


def values_of(closed: Any, inputs: Sequence[tuple[str, Role]]) -> tuple[Model, dict[Any, Value]]:
    """A step's model, and what its variables are there.

    Args:
        closed: its jaxpr, in which each variable is set in one place.
        inputs: of each of its inputs, the path and the role.
    """
    build = _Builder()
    values = build.given(closed.jaxpr.invars, inputs)
    results = build.inline(closed.jaxpr, values)
    tensors = [Tensor(*named, value) for value, named in zip(values, inputs, strict=True)]
    model = build.finish(tensors, results)
    return model, {var: build.settled(value) for var, value in build.known.items()}


class _Builder:
    """Values, ties and operations, as the program is gone through."""

    def __init__(self) -> None:
        self.dims = Dims()
        self.known: dict[Any, Value] = {}
        self._ops: list[Op] = []
        self._count = 0
        self._name = ""
        self._notes: dict[str, None] = {}
        self._apart = ""
        self._made: dict[int, Value] = {}

    def given(self, variables: Sequence[Any], inputs: Sequence[tuple[str, Role]]) -> list[Value]:
        """What the step is given; dimensions of rows are tied."""
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
        sizes = tuple(aval.shape)
        groups = tuple(
            self.dims.fresh(size, f"{name} dimension {dim}" if name else "")
            for dim, size in enumerate(sizes)
        )
        self._count += 1
        return Value(self._count, sizes, groups, aval.dtype.itemsize, str(aval.dtype))

    def emit(
        self,
        kind: Kind,
        ins: Sequence[Value],
        outs: Sequence[Value],
        summed: Sequence[int] = (),
        flops: float = 0.0,
        contract: int = 1,
    ) -> None:
        self._ops.append(
            Op(kind, self._name, tuple(ins), tuple(outs), tuple(summed), flops, contract)
        )

    def note(self, text: str) -> None:
        self._notes[text] = None

    def part(self, why: str) -> None:
        self._apart = why

    def inline(self, jaxpr: Any, args: list[Value]) -> list[Value]:
        """Its equations become this program's; `known` has its variables."""
        closed = jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr
        known: dict[Any, Value] = dict(zip(closed.invars, args, strict=True))
        for var in closed.constvars:
            known[var] = self.new(var.aval)

        def value(atom: Any) -> Value:
            return self.new(atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in closed.eqns:
            ins = [value(atom) for atom in eqn.invars]
            self._name = eqn.primitive.name
            nested = NESTED.get(eqn.primitive.name)
            if nested is not None:
                outs = nested(self, eqn, ins)
            else:
                outs = RULES.get(eqn.primitive.name, unknown)(self, eqn, ins)
            known.update(zip(eqn.outvars, outs, strict=True))
        self.known |= known
        return [value(atom) for atom in closed.outvars]

    def loop(self, jaxpr: Any, args: list[Value], times: int) -> list[Value]:
        """Its equations become the body of one operation."""
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
        """The last loop reads and leaves these."""
        self._ops[-1] = replace(
            self._ops[-1],
            ins=tuple(ins),
            outs=tuple(outs),
            carried=tuple(carried),
            over=tuple(over),
        )

    def finish(self, tensors: list[Tensor], results: list[Value]) -> Model:
        """The model, once all is gone through."""
        settled = self.settled

        def op(old: Op) -> Op:
            return replace(
                old,
                ins=tuple(map(settled, old.ins)),
                outs=tuple(map(settled, old.outs)),
                summed=tuple(self._group(dim) for dim in old.summed if dim >= 0),
                body=tuple(map(op, old.body)),
                carried=tuple(map(settled, old.carried)),
                over=tuple(map(settled, old.over)),
            )

        model = Model(
            tensors=tuple(replace(t, value=settled(t.value)) for t in tensors),
            groups=self._groups[1],
            ops=tuple(map(op, self._ops)),
            results=frozenset(value.number for value in results),
            apart=self._apart,
            notes=tuple(self._notes),
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
        """It, with the numbers that groups have once all is gone through."""
        if value.number not in self._made:
            groups = tuple(map(self._group, value.groups))
            self._made[value.number] = replace(value, groups=groups)
        return self._made[value.number]

    @cached_property
    def _groups(self) -> tuple[dict[int, int], tuple[Group, ...]]:
        return self.dims.groups()

    def _group(self, dim: int) -> int:
        return self._groups[0][self.dims.find(dim)] if dim >= 0 else -1


def _call(name: str) -> Nested:
    def nested(build: _Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        return build.inline(eqn.params[name], ins)

    return nested


def _scan(build: _Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    params = eqn.params
    consts, carries = params["num_consts"], params["num_carry"]
    body_vars = params["jaxpr"].jaxpr.invars
    stacked = ins[consts + carries :]
    slices = [build.new(var.aval) for var in body_vars[consts + carries :]]
    for whole, part in zip(stacked, slices, strict=True):
        _tie_slices(build, whole, part)
    carry = [build.new(var.aval) for var in body_vars[consts : consts + carries]]
    outs = build.loop(params["jaxpr"], [*ins[:consts], *carry, *slices], params["length"])
    made = [build.new(var.aval) for var in eqn.outvars]
    for before, first, after, last in zip(
        carry, ins[consts : consts + carries], outs[:carries], made[:carries], strict=True
    ):
        for other in (first, after, last):
            _tie(build, before, other)
    for part, whole in zip(outs[carries:], made[carries:], strict=True):
        _tie_slices(build, whole, part)
    build.close(ins, made, made[:carries], [*stacked, *made[carries:]])
    return made


def _while(build: _Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """How often it runs nobody knows: its body counts once."""
    params = eqn.params
    conds, bodies = params["cond_nconsts"], params["body_nconsts"]
    carry = ins[conds + bodies :]
    build.inline(params["cond_jaxpr"], [*ins[:conds], *carry])
    outs = build.loop(params["body_jaxpr"], [*ins[conds : conds + bodies], *carry], 1)
    build.close(ins, outs)
    for before, after in zip(carry, outs, strict=True):
        _tie(build, before, after)
    build.note("a while loop counts as if it ran once")
    return outs


def _cond(build: _Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Every branch counts: which one is taken nobody knows."""
    made = [build.new(var.aval) for var in eqn.outvars]
    for branch in eqn.params["branches"]:
        for out, own in zip(made, build.inline(branch, ins[1:]), strict=True):
            _tie(build, out, own)
    build.emit("stream", (), made)
    return made


def _tie(build: _Builder, a: Value, b: Value) -> None:
    for x, y in zip(a.groups, b.groups, strict=True):
        build.dims.tie(x, y)


def _tie_slices(build: _Builder, whole: Value, part: Value) -> None:
    """What a scan goes over is never cut along its first dimension."""
    build.dims.block(whole.groups[0], "a scan goes over it")
    for x, y in zip(whole.groups[1:], part.groups, strict=True):
        build.dims.tie(x, y)


NESTED: dict[str, Nested] = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), _call("jaxpr")),
    **dict.fromkeys(("closed_call", "core_call"), _call("call_jaxpr")),
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _call("call_jaxpr")
    ),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
"""Primitives that hold programs, by name."""
