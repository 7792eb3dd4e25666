"""A program without calls: what it calls is part of it, and each variable is set in one place.

So equations can be taken out, and put elsewhere with other names.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var, jaxpr_as_fun, new_jaxpr_eqn
from jax.interpreters import partial_eval
from jax.sharding import Sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CALLS = {
    **dict.fromkeys(("jit", "pjit"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), "call_jaxpr"),
}
"""Primitives that are what they call, by the parameter that holds it; rules of derivatives are of
no use any more."""


OPEN = frozenset(("checkpoint", "remat2"))
"""Primitives that hold a program without constants, in `jaxpr`."""

_BARRIER = jax.make_jaxpr(jax.lax.optimization_barrier)(0).eqns[0].primitive


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, of the same inputs, without what nothing needs.

    So are the bodies of its scans and checkpoints, and branches.
    """
    used = [True] * len(closed.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    made = _Flat()
    outs = made.add(ClosedJaxpr(needed, closed.consts), list(needed.invars))
    jaxpr = needed.replace(constvars=made.constants, eqns=made.eqns, outvars=outs)
    return ClosedJaxpr(jaxpr, made.values)


class _Flat:
    """Equations, and the constants that they need."""

    def __init__(self) -> None:
        self.eqns: list[Any] = []
        self.constants: list[Var] = []
        self.values: list[Any] = []

    def add(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """A program's equations with these for its inputs; what it leaves."""
        jaxpr, values = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        known: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, values, strict=True):
            known[var] = self._constant(var, value)

        def now(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            ins = [now(atom) for atom in eqn.invars]
            called = _called(eqn)
            if called is not None:
                outs = self.add(called, ins)
            else:
                outs = [
                    DropVar(var.aval) if isinstance(var, DropVar) else Var(var.aval)
                    for var in eqn.outvars
                ]
                self.eqns.append(eqn.replace(invars=ins, outvars=outs, params=_params(eqn)))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [now(atom) for atom in jaxpr.outvars]

    def _constant(self, var: Var, value: Any) -> Var:
        self.constants.append(Var(var.aval))
        self.values.append(value)
        return self.constants[-1]


def _called(eqn: Any) -> Any:
    """What an equation is no more than a call of; None where it says more."""
    name = _CALLS.get(eqn.primitive.name)
    asked = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if name is None or any(isinstance(sharding, Sharding) for sharding in asked):
        return None
    return eqn.params[name]


def _params(eqn: Any) -> dict[str, Any]:
    """Its own, with the program that it holds flat as well, if that needs no constants."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in OPEN:
        params["jaxpr"] = _held(params["jaxpr"]) or params["jaxpr"]
    elif name == "scan":
        params["jaxpr"] = _closed(params["jaxpr"])
    elif name == "cond":
        params["branches"] = tuple(map(_closed, params["branches"]))
    return params


def _closed(program: ClosedJaxpr) -> ClosedJaxpr:
    made = _held(program)
    return program if made is None else ClosedJaxpr(made, [])


def _held(program: Any) -> Jaxpr | None:
    """A program that an equation holds, flat; None where it needs constants."""
    whole: Jaxpr = program if isinstance(program, Jaxpr) else program.jaxpr
    made = _Flat()
    ins = [Var(var.aval) for var in whole.invars]
    outs = made.add(program, ins)
    return None if made.constants else whole.replace(invars=ins, eqns=made.eqns, outvars=outs)


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """A flat program, with what its checkpoints hold in their place."""
    names: dict[Var, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        ins = renamed(eqn.invars, names)
        if eqn.primitive.name in OPEN:
            held = opened(eqn.params["jaxpr"])
            own = dict(zip(held.invars, ins, strict=True))
            eqns += [one.replace(invars=renamed(one.invars, own)) for one in held.eqns]
            names |= dict(zip(eqn.outvars, renamed(held.outvars, own), strict=True))
        else:
            eqns.append(eqn.replace(invars=ins))
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


def make(
    jaxpr: Jaxpr, eqns: list[Any], there: dict[Var, Any], read: Callable[[Var], Any] | None = None
) -> None:
    """Run some equations of a flat program.

    Args:
        jaxpr: the program.
        eqns: those of it, in their order.
        there: the values that there are; what they make is added.
        read: gets one of them, where that takes more than a look.
    """
    made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, DropVar)]
    own = set(made)
    given = dict.fromkeys(v for e in eqns for v in variables(e.invars) if v not in own)
    part = jaxpr.replace(constvars=[], invars=list(given), eqns=eqns, outvars=made)
    values = jaxpr_as_fun(ClosedJaxpr(part, []))(*map(read or there.__getitem__, given))
    there.update(zip(made, values, strict=True))


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def renamed(atoms: Sequence[Any], names: Mapping[Var, Any]) -> list[Any]:
    """With other names for some."""
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def barrier(ins: list[Var], outs: list[Var], like: Any) -> Any:
    """An equation after which values are there under other names, none before all are.

    Args:
        ins: the values.
        outs: what they are called after it.
        like: an equation at the same place of the user's source.
    """
    return new_jaxpr_eqn(ins, outs, _BARRIER, {}, set(), like.source_info, like.ctx)


def is_plain_product(eqn: Any) -> bool:
    """A convolution, or a product of matrices that is none for each sample apart."""
    name = eqn.primitive.name
    if name == "dot_general":
        return not any(eqn.params["dimension_numbers"][1])
    return bool(name == "conv_general_dilated")


def nbytes(var: Var) -> int:
    """Of all of it."""
    aval: Any = var.aval
    return int(math.prod(aval.shape)) * int(aval.dtype.itemsize)
