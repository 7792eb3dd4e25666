"""Rematerialization: a step whose backward pass recomputes activations.

The rewriting changes the step's jaxpr, in whichever library it was written, so that the planned
program is the one that runs. `full` divides the forward pass into segments and keeps the inputs of
each; their lengths minimize memory (arXiv:1604.06174). `selective` keeps results of products and
convolutions with parameters (arXiv:2205.05198; `dots_with_no_batch_dims_saveable` of
`jax.checkpoint`). A barrier ties recomputed values to the backward pass, as in `jax.checkpoint`: a
compiler would otherwise merge them with the first computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Var
from jax.interpreters import partial_eval

from nbdist.jaxpr.core import jaxprs_in_params
from nbdist.jaxpr.flatten import barrier, flat, is_plain_product, nbytes, renamed, variables
from nbdist.jaxpr.planner_model import of_rows
from nbdist.jaxpr.remat_scans import paired
from nbdist.planner.graph.fusion import ADDS
from nbdist.planner.graph.remat_segments import segments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jax.extend.core import Jaxpr

    from nbdist.planner.graph.model import Role
    from nbdist.records import Remat

_SMALL = 4096
"""Bytes of small values without rows that may pass a barrier, such as random keys."""


def rematerialised(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], how: Remat
) -> ClosedJaxpr:
    """Return the same step with less memory and more computation.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        how: activations that are recomputed.
    """
    program = flat(closed)
    rows, used = set(of_rows(program, inputs)), [True] * len(closed.jaxpr.outvars)
    left, _ = partial_eval.dce_jaxpr(_rewritten(program.jaxpr, rows, how), used, instantiate=True)
    return ClosedJaxpr(left, program.consts)


def _rewritten(jaxpr: Jaxpr, rows: set[Var], how: Remat) -> Jaxpr:
    eqns, done = paired(jaxpr, rows, how)
    inner = [eqn if place in done else _with_body(eqn, rows, how) for place, eqn in enumerate(eqns)]
    return jaxpr.replace(eqns=list(_Step(inner, jaxpr.outvars, rows, how).eqns()))


def _with_body(eqn: Any, rows: set[Var], how: Remat) -> Any:
    """Rewrite a scan whose body holds a whole step with its backward pass."""
    if eqn.primitive.name != "scan":
        return eqn
    body = eqn.params["jaxpr"]
    made = ClosedJaxpr(_rewritten(body.jaxpr, rows, how), body.consts)
    return eqn.replace(params={**eqn.params, "jaxpr": made})


class _Step:
    """A flat program with a forward pass and a backward pass.

    Args:
        eqns: its equations, in order.
        outs: its results.
        rows: variables with rows of the batch.
        how: activations that are recomputed.
    """

    def __init__(self, eqns: list[Any], outs: Sequence[Any], rows: set[Var], how: Remat) -> None:
        self._eqns = eqns
        self._rows = rows
        self._makers = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
        self._uses: dict[Var, list[int]] = {var: [] for var in self._makers}
        for place, eqn in enumerate(eqns):
            for var in variables(eqn.invars):
                if var in self._uses:
                    self._uses[var].append(place)
        left = set(variables(outs))
        self._forward_end = self._find_end_of_forward()
        self._lost = {
            var
            for place, eqn in enumerate(eqns[: self._forward_end + 1])
            for var in eqn.outvars
            if var in rows and var not in left and _can_be_recomputed(eqn)
        }
        self._lost -= self._selected() if how == "selective" else self._segment_results()

    def eqns(self) -> Iterator[Any]:
        """Yield the equations, with recomputed ones before their first use."""
        now: dict[Var, Var] = {}
        for place, eqn in enumerate(self._eqns):
            if place > self._forward_end:
                missing = [v for v in variables(eqn.invars) if v in self._lost and v not in now]
                if missing:
                    yield from self._recomputed(missing, eqn, now)
            yield eqn.replace(invars=renamed(eqn.invars, now))

    def _find_end_of_forward(self) -> int:
        """Return the position between both passes, at which most values wait for their use."""
        over = [0] * (len(self._eqns) + 1)
        for var, uses in self._uses.items():
            if var in self._rows and uses:
                over[self._makers[var]] += 1
                over[uses[-1]] -= 1
        waiting, most, forward_end = 0, 0, 0
        for place, change in enumerate(over[:-1]):
            waiting += change
            if waiting > most:
                most, forward_end = waiting, place
        return forward_end

    def _selected(self) -> set[Var]:
        """Return results of products with parameters, and sums of values from several of them.

        Without these sums, the input of each layer would be recomputed from all layers before it.
        """
        kept: set[Var] = set()
        origins: dict[Var, frozenset[Var]] = {}
        for eqn in self._eqns[: self._forward_end + 1]:
            of_rows = [var for var in variables(eqn.invars) if var in self._rows]
            found = [origins.get(var, frozenset((var,))) for var in of_rows]
            joins = len(found) == 2 and all(found) and found[0].isdisjoint(found[1])
            if is_plain_product(eqn) or (joins and eqn.primitive.name in ADDS):
                kept.update(eqn.outvars)
                origins.update((var, frozenset((var,))) for var in eqn.outvars)
            else:
                origins.update(dict.fromkeys(eqn.outvars, frozenset().union(*found)))
        return kept

    def _segment_results(self) -> set[Var]:
        """Return values that cross from one segment into the next, and all of the last segment."""
        forward_end = self._forward_end
        kept, crossing = [0] * (forward_end + 1), [0] * (forward_end + 2)
        of_rows = [
            var for var in self._makers if var in self._rows and self._makers[var] <= forward_end
        ]
        ahead = {
            var: max((u for u in self._uses[var] if u <= forward_end), default=-1)
            for var in of_rows
        }
        for var in of_rows:
            made, size = self._makers[var], nbytes(var)
            if self._uses[var] and self._uses[var][-1] > forward_end:
                kept[made] += size
            if ahead[var] > made:
                crossing[made] += size
                crossing[ahead[var]] -= size
        for place in range(forward_end):
            crossing[place + 1] += crossing[place]
        ends = segments(kept, crossing[: forward_end + 1])
        if not ends:
            return set(of_rows)
        return {
            var
            for var in of_rows
            if self._makers[var] > ends[-1]
            or any(self._makers[var] <= end < ahead[var] for end in ends)
        }

    def _is_backward(self, var: Var) -> bool:
        """Return True if the backward pass computes the variable."""
        return self._makers.get(var, -1) > self._forward_end

    def _is_repeated(self, var: Var) -> bool:
        """Return True if it repeats a smaller value: a barrier would hold all of it in memory."""
        eqn = self._eqns[self._makers[var]]
        is_broadcast = eqn.primitive.name == "broadcast_in_dim"
        return is_broadcast and nbytes(var) > sum(map(nbytes, variables(eqn.invars)))

    def _recomputed(self, missing: list[Var], user: Any, now: dict[Var, Var]) -> Iterator[Any]:
        places: set[int] = set()
        border: dict[Var, Var] = {}
        todo = list(missing)
        while todo:
            place = self._makers[todo.pop()]
            if place in places:
                continue
            places.add(place)
            for var in variables(self._eqns[place].invars):
                if var in self._lost:
                    if var not in now:
                        todo.append(var)
                elif var in self._rows or nbytes(var) <= _SMALL:
                    border[var] = Var(var.aval)
        triggers = [v for v in variables(user.invars) if self._is_backward(v)]
        repeats = {var: self._eqns[self._makers[var]] for var in triggers if self._is_repeated(var)}
        sources = [v for eqn in repeats.values() for v in variables(eqn.invars)]
        behind = [*triggers, *filter(self._is_backward, sources)]
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


def _can_be_recomputed(eqn: Any) -> bool:
    return not eqn.effects and not any(jaxprs_in_params(eqn.params))
