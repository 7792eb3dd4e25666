"""Rematerialization of scans over layers.

JAX differentiates a scan into two: the first stacks the values that each iteration of the second
needs. Here, the first stacks the inputs of each iteration, and the second recomputes the iteration.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import Literal, Var

from nbdist.jaxpr.core import scan_counts, scan_params, unmapped_aval
from nbdist.jaxpr.flatten import barrier, is_plain_product, nbytes, renamed, variables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.records import Remat


class Scan(NamedTuple):
    """A scan; `parts` divides its inputs into constants, carried and scanned values."""

    eqn: Any
    constants: int
    carried: int

    @property
    def body(self) -> Jaxpr:
        jaxpr: Jaxpr = self.eqn.params["jaxpr"].jaxpr
        return jaxpr

    def parts(self, all_: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        first, second = self.constants, self.constants + self.carried
        return list(all_[:first]), list(all_[first:second]), list(all_[second:])


def paired(jaxpr: Jaxpr, rows: set[Var], how: Remat) -> tuple[list[Any], set[int]]:
    """Return a flat program with the iterations of its scans recomputed.

    Args:
        jaxpr: the program.
        rows: variables with rows of the batch; new variables are added.
        how: activations that are recomputed.

    Returns:
        Its equations, and the positions of the scans that form a pair.
    """
    eqns = list(jaxpr.eqns)
    done: set[int] = set()
    for (first, second), stacked in _pairs(jaxpr).items():
        if not {first, second}.isdisjoint(done):
            continue
        made = _rewritten_pair(
            scan_of(eqns[first]), scan_of(eqns[second]), stacked & rows, rows, how
        )
        if made is not None:
            eqns[first], eqns[second] = made
        done |= {first, second}
    return eqns, done


def _pairs(jaxpr: Jaxpr) -> dict[tuple[int, int], set[Var]]:
    """Return pairs of scans with the stacks that only the second one reads, largest first."""
    makers = {
        var: place
        for place, eqn in enumerate(jaxpr.eqns)
        if is_scan(eqn)
        for var in eqn.outvars[scan_counts(eqn.params)[1] :]
    }
    users: dict[Var, list[tuple[int, bool]]] = defaultdict(list)
    for place, eqn in enumerate(jaxpr.eqns):
        over = scan_of(eqn).parts(eqn.invars)[2] if is_scan(eqn) else []
        for var in variables(eqn.invars):
            if var in makers:
                users[var].append((place, any(var is one for one in over)))
    left = set(variables(jaxpr.outvars))
    found: dict[tuple[int, int], set[Var]] = defaultdict(set)
    for var, first in makers.items():
        if var not in left and len(users[var]) == 1:
            ((second, is_scanned),) = users[var]
            lengths = {
                jaxpr.eqns[place].params["length"] for place in (first, second) if is_scanned
            }
            if len(lengths) == 1:
                found[first, second].add(var)
    return dict(sorted(found.items(), key=lambda item: -sum(map(nbytes, item[1]))))


def _rewritten_pair(
    first: Scan, second: Scan, lost: set[Var], rows: set[Var], how: Remat
) -> tuple[Any, Any] | None:
    """Return both scans of a pair, rewritten; None if this saves no memory.

    Args:
        first: the forward scan.
        second: the backward scan.
        lost: stacks to drop if their values can be recomputed.
        rows: variables with rows; new variables are added.
        how: activations that are recomputed.
    """
    stacks = first.eqn.outvars[first.carried :]
    inside = dict(zip(stacks, first.body.outvars[first.carried :], strict=True))
    makers = {var: eqn for eqn in first.body.eqns for var in eqn.outvars}
    lost = {var for var in lost if not isinstance(inside[var], Literal)}
    if how == "selective":
        lost = {
            v for v in lost if inside[v] not in makers or not is_plain_product(makers[inside[v]])
        }
    slices = dict(
        zip(second.parts(second.eqn.invars)[2], second.parts(second.body.invars)[2], strict=True)
    )
    remaining = {
        inside[var]: slices[var]
        for var in stacks
        if var in slices and var not in lost and not isinstance(inside[var], Literal)
    }
    eqns, needed = _slice_of_body(first.body, [inside[var] for var in lost], set(remaining))
    kept = [var for var in first.parts(first.body.invars)[1] if var in needed]
    length = first.eqn.params["length"]
    stacked = {var: Var(unmapped_aval(length, 0, var.aval)) for var in kept}
    effects = first.eqn.effects or second.eqn.effects or any(eqn.effects for eqn in eqns)
    if effects or sum(map(nbytes, stacked.values())) >= sum(map(nbytes, lost)):
        return None
    rows |= set(stacked.values())
    ahead = _forward(first, lost, stacked)
    return ahead, _backward(
        first, second, _Recomputation(eqns, needed, remaining, inside, lost, stacked)
    )


class _Recomputation(NamedTuple):
    """Values that an iteration of the second scan recomputes.

    Attributes:
        eqns: equations of the first scan's body.
        needed: inputs of that body that they need.
        remaining: values of the first body that remain stacked, with their variables in the second
            body.
        inside: the value of the first body for each stack.
        lost: stacks that are dropped.
        stacked: new stacks, by the input of the first body.
    """

    eqns: list[Any]
    needed: set[Var]
    remaining: dict[Var, Var]
    inside: dict[Var, Any]
    lost: set[Var]
    stacked: dict[Var, Var]


def _slice_of_body(
    body: Jaxpr, wanted: list[Var], remaining: set[Var]
) -> tuple[list[Any], set[Var]]:
    """Return the equations that compute some values, and the inputs of the body that they need."""
    open_ = set(wanted) - remaining
    eqns = []
    for eqn in reversed(body.eqns):
        if not open_.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            open_ |= set(variables(eqn.invars)) - remaining
    return eqns[::-1], open_ & set(body.invars)


def _forward(first: Scan, lost: set[Var], stacked: dict[Var, Var]) -> Any:
    outs, made = list(first.body.outvars), list(first.eqn.outvars)
    left = [place for place, var in enumerate(made) if var not in lost]
    body = first.body.replace(outvars=[*(outs[place] for place in left), *stacked])
    return first.eqn.replace(
        outvars=[*(made[place] for place in left), *stacked.values()],
        params=scan_params(first.eqn.params, body),
    )


def _backward(first: Scan, second: Scan, recomputed: _Recomputation) -> Any:
    """Return the second scan, which recomputes values of the first."""
    outer = dict(zip(first.body.invars, first.eqn.invars, strict=True))
    constants, _, over = (
        [var for var in part if var in recomputed.needed] for part in first.parts(first.body.invars)
    )
    given, given_carried, given_scanned = second.parts(second.eqn.invars)
    left = [place for place, var in enumerate(given_scanned) if var not in recomputed.lost]
    body = _recomputing_body(second, recomputed, constants, over, left)
    return second.eqn.replace(
        invars=[
            *given,
            *(outer[var] for var in constants),
            *given_carried,
            *(given_scanned[place] for place in left),
            *recomputed.stacked.values(),
            *(outer[var] for var in over),
        ],
        params=scan_params(second.eqn.params, body, second.constants + len(constants)),
    )


def _recomputing_body(
    second: Scan,
    recomputed: _Recomputation,
    constants: list[Var],
    over: list[Var],
    left: list[int],
) -> Jaxpr:
    """Return the body of the second scan, which recomputes values of the first before their use.

    Args:
        second: the backward scan.
        recomputed: the values.
        constants: additional constants, as inputs of the first body.
        over: additional scanned values, as inputs of the first body.
        left: positions of the scanned values that remain.
    """
    names = {var: Var(var.aval) for var in recomputed.needed} | recomputed.remaining
    inputs, carried, scanned = second.parts(second.body.invars)
    ins = [
        *inputs,
        *(names[var] for var in constants),
        *carried,
        *(scanned[place] for place in left),
        *(names[var] for var in recomputed.stacked),
        *(names[var] for var in over),
    ]
    # The barrier delays recomputation until the previous iteration has ended.
    behind = {var: Var(var.aval) for var in (*(names[v] for v in recomputed.stacked), *carried)}
    eqns = [barrier(list(behind), list(behind.values()), second.eqn)]
    names |= {var: behind[names[var]] for var in recomputed.stacked}
    for eqn in recomputed.eqns:
        fresh = [Var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=renamed(eqn.invars, names), outvars=fresh))
        names.update(zip(eqn.outvars, fresh, strict=True))
    slices = dict(zip(second.parts(second.eqn.invars)[2], scanned, strict=True))
    back = {var: behind[var] for var in carried}
    back |= {slices[var]: names[recomputed.inside[var]] for var in recomputed.lost}
    eqns += [eqn.replace(invars=renamed(eqn.invars, back)) for eqn in second.body.eqns]
    return second.body.replace(invars=ins, eqns=eqns, outvars=renamed(second.body.outvars, back))


def is_scan(eqn: Any) -> bool:
    """Return True if it is a scan whose body needs no constants."""
    return bool(eqn.primitive.name == "scan" and not eqn.params["jaxpr"].consts)


def scan_of(eqn: Any) -> Scan:
    return Scan(eqn, *scan_counts(eqn.params))
