"""The planner's model of a step, read from its jaxpr: shapes only, without arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from jax.interpreters import partial_eval

from nbdist.jaxpr.core import lowered, scan_counts
from nbdist.jaxpr.flatten import called_program, variables
from nbdist.jaxpr.model_builder import Builder
from nbdist.jaxpr.pallas_calls import NAME
from nbdist.jaxpr.pallas_products import pallas_rule
from nbdist.jaxpr.rules import PLAIN, unknown
from nbdist.planner.graph.layers import with_stacked_layers
from nbdist.planner.graph.model import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.jaxpr.model_builder import Rule
    from nbdist.planner.graph.model import Model, Role, Value


def model_of(closed: Any, inputs: Sequence[tuple[str, Role]]) -> Model:
    """Return the model of a step.

    Args:
        closed: `jax.core.ClosedJaxpr`, from `jax.make_jaxpr` or `jit(...).trace(...)`.
        inputs: path and role of each input.
    """
    build = Builder(_RULES, unknown)
    closed = lowered(closed)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    values = build.given(closed.jaxpr.invars, inputs)
    needed = [value for value, is_used in zip(values, used, strict=True) if is_used]
    results = build.inline(jaxpr, needed)
    tensors = [
        Tensor(path, role, value, is_used)
        for value, (path, role), is_used in zip(values, inputs, used, strict=True)
    ]
    return build.finish(tensors, results)


class _Analysis(NamedTuple):
    """A program's model, and the dimensions that are rows of the batch, by variable."""

    model: Model
    rows: dict[Any, tuple[int, ...]]


_known: WeakKeyDictionary[Any, dict[tuple[tuple[str, Role], ...], _Analysis]] = WeakKeyDictionary()
"""Analysed programs. A search rewrites one step several times."""


def of_rows(closed: Any, inputs: Sequence[tuple[str, Role]]) -> dict[Any, tuple[int, ...]]:
    """Return the dimensions that are rows of the batch, by variable; others have no rows.

    Args:
        closed: the step's jaxpr, in which each variable is set once.
        inputs: path and role of each input.
    """
    return dict(_analysis(closed, inputs).rows)


def model_of_stages(closed: Any, inputs: Sequence[tuple[str, Role]]) -> Model:
    """Return the model of a flat step without dead code that stacks separate layers for stages.

    It shares its analysis with `of_rows`.

    Args:
        closed: the step's jaxpr, from `flat`.
        inputs: path and role of each input.
    """
    model, jaxpr = _analysis(closed, inputs).model, closed.jaxpr
    used = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)} | {*variables(jaxpr.outvars)}
    tensors = zip(model.tensors, jaxpr.invars, strict=True)
    tensors_used = tuple(replace(t, used=var in used) for t, var in tensors)
    return with_stacked_layers(replace(model, tensors=tensors_used))


def _analysis(closed: Any, inputs: Sequence[tuple[str, Role]]) -> _Analysis:
    key = tuple(inputs)
    known = _known.setdefault(closed, {})
    if key not in known:
        model, values = values_of(closed, inputs)
        found = {var: _dimensions(value, model.batch_groups) for var, value in values.items()}
        known[key] = _Analysis(model, {var: dims for var, dims in found.items() if dims})
    return known[key]


def _dimensions(value: Value, groups: frozenset[int]) -> tuple[int, ...]:
    """Return the dimensions of a value that are in some groups."""
    if groups.isdisjoint(value.groups):
        return ()
    return tuple(dim for dim, group in enumerate(value.groups) if group in groups)


def values_of(closed: Any, inputs: Sequence[tuple[str, Role]]) -> tuple[Model, dict[Any, Value]]:
    """Return a step's model, and the model's value of each variable.

    Args:
        closed: the step's jaxpr, in which each variable is set once.
        inputs: path and role of each input.
    """
    build = Builder(_RULES, unknown)
    values = build.given(closed.jaxpr.invars, inputs)
    results = build.inline(closed.jaxpr, values)
    tensors = [Tensor(*named, value) for value, named in zip(values, inputs, strict=True)]
    model = build.finish(tensors, results)
    return model, {var: build.settled(value) for var, value in build.known.items()}


def _call(name: str) -> Rule:
    def nested(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        return build.inline(eqn.params[name], ins)

    return nested


def _jit(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    around = build.unrewritten
    if called_program(eqn) is None:
        build.unrewritten = "it is in a jit that sets shardings"
    outs = build.inline(eqn.params["jaxpr"], ins)
    build.unrewritten = around
    return outs


def _scan(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    params = eqn.params
    consts, carries = scan_counts(params)
    body_vars = params["jaxpr"].jaxpr.invars
    stacked = ins[consts + carries :]
    slices = [build.new(var.aval) for var in body_vars[consts + carries :]]
    for whole, part in zip(stacked, slices, strict=True):
        _tie_slices(build, whole, part)
    carry = [build.new(var.aval) for var in body_vars[consts : consts + carries]]
    outs = build.loop(params["jaxpr"], [*ins[:consts], *carry, *slices], params["length"])
    made = build.outs(eqn)
    for before, first, after, last in zip(
        carry, ins[consts : consts + carries], outs[:carries], made[:carries], strict=True
    ):
        for other in (first, after, last):
            build.dims.tie_all(before.groups, other.groups)
    for part, whole in zip(outs[carries:], made[carries:], strict=True):
        _tie_slices(build, whole, part)
    build.close(ins, made, made[:carries], [*stacked, *made[carries:]])
    return made


def _while(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Add a while loop; its body counts once, because the number of iterations is unknown."""
    params = eqn.params
    conds, bodies = params["cond_nconsts"], params["body_nconsts"]
    carry = ins[conds + bodies :]
    build.inline(params["cond_jaxpr"], [*ins[:conds], *carry])
    around, build.unrewritten = build.unrewritten, "it is in a while loop"
    outs = build.loop(params["body_jaxpr"], [*ins[conds : conds + bodies], *carry], 1)
    build.unrewritten = around
    build.close(ins, outs)
    for before, after in zip(carry, outs, strict=True):
        build.dims.tie_all(before.groups, after.groups)
    build.note("a while loop counts as one iteration")
    return outs


def _cond(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Add a conditional; all branches count, because the taken one is unknown."""
    made = build.outs(eqn)
    for branch in eqn.params["branches"]:
        for out, own in zip(made, build.inline(branch, ins[1:]), strict=True):
            build.dims.tie_all(out.groups, own.groups)
    build.emit("stream", (), made)
    return made


def _tie_slices(build: Builder, whole: Value, part: Value) -> None:
    """Tie an array to its slices; its first dimension, which a scan goes over, is never sharded."""
    build.dims.block(whole.groups[0], "a scan goes over it")
    build.dims.tie_all(whole.groups[1:], part.groups)


_RULES: dict[str, Rule] = {
    **PLAIN,
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("remat2", "checkpoint"), _call("jaxpr")),
    **dict.fromkeys(("closed_call", "core_call", "eval_jaxpr"), _call("call_jaxpr")),
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _call("call_jaxpr")
    ),
    NAME: pallas_rule,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
