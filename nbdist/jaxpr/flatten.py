"""Flat programs: calls are inlined, and each variable is set in one place.

Equations of a flat program can be taken out and put elsewhere with other variables.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import Sharding

from nbdist.jaxpr.core import DropVar, jaxprs_in_params, lowered, new_jaxpr_eqn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_CALLS = {
    **dict.fromkeys(("jit", "pjit"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "eval_jaxpr"), "call_jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), "call_jaxpr"),
}
"""Primitives that only call a program, by the parameter that holds it. Custom derivative rules are
no longer needed at this point."""


OPEN = frozenset(("checkpoint", "remat2"))
"""Primitives that hold a program without constants, in `jaxpr`."""

_BARRIER = jax.make_jaxpr(jax.lax.optimization_barrier)(0).eqns[0].primitive


_known: WeakKeyDictionary[ClosedJaxpr, ClosedJaxpr] = WeakKeyDictionary()


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program, flat and without dead code.

    Bodies of scans, checkpoints and branches are made flat as well. The result is stored as long as
    the given program exists, because a search rewrites one step several times.
    """
    if closed not in _known:
        _known[closed] = _flattened(closed)
    return _known[closed]


def _flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    closed = lowered(closed)
    used = [True] * len(closed.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    made = _Flat()
    outs = made.add(ClosedJaxpr(needed, closed.consts), list(needed.invars))
    jaxpr = needed.replace(constvars=made.constants, eqns=made.eqns, outvars=outs)
    return ClosedJaxpr(jaxpr, made.values)


class _Flat:
    """Equations of a flat program, and the constants that they need."""

    def __init__(self) -> None:
        self.eqns: list[Any] = []
        self.constants: list[Var] = []
        self.values: list[Any] = []

    def add(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Add the equations of a program with these inputs, and return its results."""
        jaxpr, values = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
        known: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, values, strict=True):
            known[var] = self._constant(var, value)

        def now(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            ins = [now(atom) for atom in eqn.invars]
            called = called_program(eqn)
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


def called_program(eqn: Any) -> Any:
    """Return the program that an equation calls; None if it does more, such as set shardings."""
    name = _CALLS.get(eqn.primitive.name)
    asked = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if name is None or any(isinstance(sharding, Sharding) for sharding in asked):
        return None
    return eqn.params[name]


def _params(eqn: Any) -> dict[str, Any]:
    """Return the parameters with inner programs made flat, if these need no constants."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in OPEN:
        params["jaxpr"] = _flat_body(params["jaxpr"]) or params["jaxpr"]
    elif name == "scan":
        params["jaxpr"] = _closed(params["jaxpr"])
    elif name == "cond":
        params["branches"] = tuple(map(_closed, params["branches"]))
    return params


def _closed(program: ClosedJaxpr) -> ClosedJaxpr:
    made = _flat_body(program)
    return program if made is None else ClosedJaxpr(made, [])


def _flat_body(program: Any) -> Jaxpr | None:
    """Return an inner program, flat; None if it needs constants."""
    whole: Jaxpr = program if isinstance(program, Jaxpr) else program.jaxpr
    made = _Flat()
    ins = [Var(var.aval) for var in whole.invars]
    outs = made.add(program, ins)
    return None if made.constants else whole.replace(invars=ins, eqns=made.eqns, outvars=outs)


def inline_checkpoints(jaxpr: Jaxpr) -> Jaxpr:
    """Return a flat program with the bodies of its checkpoints inlined."""
    names: dict[Var, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        ins = renamed(eqn.invars, names)
        if eqn.primitive.name in OPEN:
            inner = inline_checkpoints(eqn.params["jaxpr"])
            own = dict(zip(inner.invars, ins, strict=True))
            eqns += [one.replace(invars=renamed(one.invars, own)) for one in inner.eqns]
            names |= dict(zip(eqn.outvars, renamed(inner.outvars, own), strict=True))
        else:
            eqns.append(eqn.replace(invars=ins))
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


def with_bodies(
    name: str, params: dict[str, Any], rewrite: Callable[[Jaxpr], Jaxpr]
) -> dict[str, Any]:
    """Return the parameters of an equation with its inner programs rewritten.

    Args:
        name: name of the equation's primitive.
        params: the equation's parameters.
        rewrite: applied to the body of a checkpoint or a scan, and to each branch.
    """

    def closed(program: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(rewrite(program.jaxpr), program.consts)

    if name in OPEN:
        return params | {"jaxpr": rewrite(params["jaxpr"])}
    if name == "scan":
        return params | {"jaxpr": closed(params["jaxpr"])}
    if name == "cond":
        return params | {"branches": tuple(map(closed, params["branches"]))}
    return params


def make(
    jaxpr: Jaxpr, eqns: list[Any], there: dict[Var, Any], read: Callable[[Var], Any] | None = None
) -> None:
    """Run some equations of a flat program.

    Args:
        jaxpr: the program.
        eqns: the equations, in program order.
        there: values by variable; the results are added.
        read: returns the value of a variable; a look-up in `there` by default.
    """
    made = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, DropVar)]
    own = set(made)
    given = dict.fromkeys(v for e in eqns for v in variables(e.invars) if v not in own)
    part = jaxpr.replace(constvars=[], invars=list(given), eqns=eqns, outvars=made)
    values = jaxpr_as_fun(ClosedJaxpr(part, []))(*map(read or there.__getitem__, given))
    there.update(zip(made, values, strict=True))


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Return the variables among some atoms; the others are literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def renamed(atoms: Sequence[Any], names: Mapping[Var, Any]) -> list[Any]:
    """Return the atoms with some variables replaced."""
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def barrier(ins: list[Var], outs: list[Var], like: Any) -> Any:
    """Return an equation that makes all values available at once, under new variables.

    Args:
        ins: the values.
        outs: their new variables.
        like: an equation whose source position is used.
    """
    return new_jaxpr_eqn(ins, outs, _BARRIER, {}, set(), like.source_info, like.ctx)


def is_plain_product(eqn: Any) -> bool:
    """Return True if it is a convolution or a matrix product without batch dimensions."""
    name = eqn.primitive.name
    if name == "dot_general":
        return not any(eqn.params["dimension_numbers"][1])
    return bool(name == "conv_general_dilated")


def nbytes(var: Var) -> int:
    """Return the size of a variable's value in bytes."""
    aval: Any = var.aval
    return int(math.prod(aval.shape)) * int(aval.dtype.itemsize)


def inner_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of all inner programs."""
    for eqn in jaxpr.eqns:
        for body in jaxprs_in_params(eqn.params):
            yield from body.eqns
            yield from inner_equations(body)
