"""A step whose backward pass makes activations again, in place of keeping them.

It is done to the step's jaxpr, whatever it was written in: what is planned is what is run. `full`
keeps of each stretch of the forward pass what goes into it, with stretches so long that least is
in memory at a time (arXiv:1604.06174); `selective` keeps what products and convolutions with
parameters make (arXiv:2205.05198; `dots_with_no_batch_dims_saveable` of `jax.checkpoint`). A
barrier ties what is made again to the backward pass, as in `jax.checkpoint`: a compiler would
otherwise find that it was there before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Var, jaxprs_in_params
from jax.interpreters import partial_eval

from nbdist.jaxpr.flatten import barrier, flat, is_plain_product, nbytes, renamed, variables
from nbdist.jaxpr.planner_model import of_rows
from nbdist.jaxpr.remat_scans import paired
from nbdist.planner.graph.remat_segments import stretches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jax.extend.core import Jaxpr

    from nbdist.planner.graph.model import Role
    from nbdist.records import Remat

_SUMS = frozenset(("add", "add_any"))
_SMALL = 4096
"""Bytes of what may pass a barrier though it is not of the batch: keys of generators."""


def rematerialised(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], how: Remat
) -> ClosedJaxpr:
    """The same step, with less in memory and more to compute.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.
        how: what is made again.
    """
    program = flat(closed)
    rows, used = set(of_rows(program, inputs)), [True] * len(closed.jaxpr.outvars)
    left, _ = partial_eval.dce_jaxpr(_again(program.jaxpr, rows, how), used, instantiate=True)
    return ClosedJaxpr(left, program.consts)


def _again(jaxpr: Jaxpr, rows: set[Var], how: Remat) -> Jaxpr:
    eqns, done = paired(jaxpr, rows, how)
    inner = [eqn if place in done else _with_body(eqn, rows, how) for place, eqn in enumerate(eqns)]
    return jaxpr.replace(eqns=list(_Step(inner, jaxpr.outvars, rows, how).eqns()))


def _with_body(eqn: Any, rows: set[Var], how: Remat) -> Any:
    """A scan that holds a whole step, its backward pass too."""
    if eqn.primitive.name != "scan":
        return eqn
    body = eqn.params["jaxpr"]
    made = ClosedJaxpr(_again(body.jaxpr, rows, how), body.consts)
    return eqn.replace(params={**eqn.params, "jaxpr": made})


class _Step:
    """A flat program that goes forward, turns, and goes backward.

    Args:
        eqns: in their order.
        outs: what it leaves.
        rows: variables that have a dimension of the batch's.
        how: what is made again.
    """

    def __init__(self, eqns: list[Any], outs: Sequence[Any], rows: set[Var], how: Remat) -> None:
        self._eqns = eqns
        self._rows = rows
        self._made = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
        self._uses: dict[Var, list[int]] = {var: [] for var in self._made}
        for place, eqn in enumerate(eqns):
            for var in variables(eqn.invars):
                if var in self._uses:
                    self._uses[var].append(place)
        left = set(variables(outs))
        self._turn = self._find_turn()
        self._lost = {
            var
            for place, eqn in enumerate(eqns[: self._turn + 1])
            for var in eqn.outvars
            if var in rows and var not in left and _can_be_made_again(eqn)
        }
        self._lost -= self._selected() if how == "selective" else self._borders()

    def eqns(self) -> Iterator[Any]:
        """The equations, and those that are made again before what needs them."""
        now: dict[Var, Var] = {}
        for place, eqn in enumerate(self._eqns):
            if place > self._turn:
                missing = [v for v in variables(eqn.invars) if v in self._lost and v not in now]
                if missing:
                    yield from self._made_again(missing, eqn, now)
            yield eqn.replace(invars=renamed(eqn.invars, now))

    def _find_turn(self) -> int:
        """Where most values wait for their use: what the last layers leave is used first."""
        over = [0] * (len(self._eqns) + 1)
        for var, uses in self._uses.items():
            if var in self._rows and uses:
                over[self._made[var]] += 1
                over[uses[-1]] -= 1
        waiting, most, turn = 0, 0, 0
        for place, change in enumerate(over[:-1]):
            waiting += change
            if waiting > most:
                most, turn = waiting, place
        return turn

    def _selected(self) -> set[Var]:
        """What products with parameters make, and sums of what comes from several of them.

        Without these sums, each layer's input would be made again of all layers before it.
        """
        kept: set[Var] = set()
        origins: dict[Var, frozenset[Var]] = {}
        for eqn in self._eqns[: self._turn + 1]:
            of_rows = [var for var in variables(eqn.invars) if var in self._rows]
            found = [origins.get(var, frozenset((var,))) for var in of_rows]
            joins = len(found) == 2 and all(found) and found[0].isdisjoint(found[1])
            if is_plain_product(eqn) or (joins and eqn.primitive.name in _SUMS):
                kept.update(eqn.outvars)
                origins.update((var, frozenset((var,))) for var in eqn.outvars)
            else:
                origins.update(dict.fromkeys(eqn.outvars, frozenset().union(*found)))
        return kept

    def _borders(self) -> set[Var]:
        """What goes from one stretch into the next, and all that the last one makes."""
        turn = self._turn
        kept, crossing = [0] * (turn + 1), [0] * (turn + 2)
        of_rows = [var for var in self._made if var in self._rows and self._made[var] <= turn]
        ahead = {var: max((u for u in self._uses[var] if u <= turn), default=-1) for var in of_rows}
        for var in of_rows:
            made, size = self._made[var], nbytes(var)
            if self._uses[var] and self._uses[var][-1] > turn:
                kept[made] += size
            if ahead[var] > made:
                crossing[made] += size
                crossing[ahead[var]] -= size
        for place in range(turn):
            crossing[place + 1] += crossing[place]
        ends = stretches(kept, crossing[: turn + 1])
        if not ends:
            return set(of_rows)
        return {
            var
            for var in of_rows
            if self._made[var] > ends[-1]
            or any(self._made[var] <= end < ahead[var] for end in ends)
        }

    def _is_behind(self, var: Var) -> bool:
        """Whether the backward pass makes it."""
        return self._made.get(var, -1) > self._turn

    def _is_repeated(self, var: Var) -> bool:
        """Whether it is something smaller, repeated: all of it would be in memory at a barrier."""
        eqn = self._eqns[self._made[var]]
        is_broadcast = eqn.primitive.name == "broadcast_in_dim"
        return is_broadcast and nbytes(var) > sum(map(nbytes, variables(eqn.invars)))

    def _made_again(self, missing: list[Var], user: Any, now: dict[Var, Var]) -> Iterator[Any]:
        places: set[int] = set()
        border: dict[Var, Var] = {}
        todo = list(missing)
        while todo:
            place = self._made[todo.pop()]
            if place in places:
                continue
            places.add(place)
            for var in variables(self._eqns[place].invars):
                if var in self._lost:
                    if var not in now:
                        todo.append(var)
                elif var in self._rows or nbytes(var) <= _SMALL:
                    border[var] = Var(var.aval)
        triggers = [v for v in variables(user.invars) if self._is_behind(v)]
        repeats = {var: self._eqns[self._made[var]] for var in triggers if self._is_repeated(var)}
        sources = [v for eqn in repeats.values() for v in variables(eqn.invars)]
        behind = [*triggers, *filter(self._is_behind, sources)]
        after = {v: Var(v.aval) for v in behind if v not in repeats}
        if border:
            passed = border | after
            yield barrier(renamed(list(passed), now), list(passed.values()), user)
            now |= after
            for var, eqn in repeats.items():
                now[var] = Var(var.aval)
                yield eqn.replace(invars=renamed(eqn.invars, now), outvars=[now[var]])
        for place in sorted(places):
            eqn = self._eqns[place]
            fresh = [Var(var.aval) for var in eqn.outvars]
            yield eqn.replace(invars=renamed(eqn.invars, border | now), outvars=fresh)
            now |= {v: f for v, f in zip(eqn.outvars, fresh, strict=True) if v in self._lost}


def _can_be_made_again(eqn: Any) -> bool:
    return not eqn.effects and not any(jaxprs_in_params(eqn.params))
