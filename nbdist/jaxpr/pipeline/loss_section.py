"""What of a step is between the layers' forward pass and their backward pass: head and loss.

Where a microbatch goes back as soon as it has come through, this is made of one microbatch at a
time; what comes before the layers, and what comes after them, is made of the whole batch.
"""

from __future__ import annotations

from itertools import chain, compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jax.extend.core import ClosedJaxpr, Var

from nbdist.errors import PlanError
from nbdist.jaxpr.batch_rows import is_by_row
from nbdist.jaxpr.flatten import renamed, variables
from nbdist.jaxpr.microbatches import Kinds
from nbdist.jaxpr.pipeline.layer_scans import over_layers
from nbdist.jaxpr.planner_model import of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.jaxpr.microbatches import Kind, Rows
    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.planner.graph.model import Role

When = Literal["before", "ahead", "between", "after"]
"""Of an operation: it is made first, of the whole batch; so, of what the layers leave that has
nothing of rows; of one microbatch at a time; last, of the whole batch."""

_TWO = "it takes one scan over layers and its way back, and nothing else over layers"
_STACKS = "what each layer leaves is used otherwise than on the way back"
_SUMS = "the way back needs a sum over all rows of what the layers make"
_MORE = "layers are given more on the way back than rows that go through them"


class Halves(NamedTuple):
    """A step around its layers.

    Attributes:
        forward: the layers, on the way there.
        backward: the layers, on the way back.
        eqns: what else it makes, by when; what repeats a value may be there twice.
        kinds: of what is made between.
        turning: what goes into the way back, by the numbers of what the scan passes on.
    """

    forward: Layers
    backward: Layers
    eqns: dict[When, list[Any]]
    kinds: dict[Var, Kind]
    turning: dict[int, Var]


def without_bars(program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> ClosedJaxpr:
    """A flat program, in which nothing else waits for what layers make before their way back.

    What is made again on the way back waits for that with all that it is made of, such as masks and
    labels; here, these are there beforehand.

    Args:
        program: the step.
        inputs: of each of its inputs, the path and the role.

    Raises:
        PlanError: it has no scan over layers.
    """
    jaxpr = program.jaxpr
    places = sorted(over_layers(program, inputs, of_rows(program, inputs)))
    mixed, late = ({*jaxpr.eqns[places[n]].outvars} for n in (0, -1))
    names: dict[Var, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        ins, outs = renamed(eqn.invars, names), list(eqn.outvars)
        is_early = late.isdisjoint(variables(ins))
        if eqn.primitive.name == "optimization_barrier" and is_early:
            waits = [isinstance(atom, Var) and atom in mixed for atom in ins]
            names |= {out: ins[n] for n, out in enumerate(outs) if not waits[n]}
            ins, outs = (list(compress(side, waits)) for side in (ins, outs))
        if not mixed.isdisjoint(variables(ins)):
            mixed.update(outs)
        late.update(outs if not is_early else ())
        if outs:
            eqns.append(eqn.replace(invars=ins, outvars=outs))
    outvars = renamed(jaxpr.outvars, names)
    return ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), program.consts)


def halves(program: ClosedJaxpr, layers: Mapping[int, Layers], rows: Rows) -> Halves:
    """A step around its layers.

    Args:
        program: the step, flat.
        layers: its scans over layers, by their places.
        rows: where it has rows.

    Raises:
        PlanError: it has other layers than one scan and its way back, or a microbatch cannot go
            back before all have come through.
    """
    try:
        return _Halving(program, layers, rows).halves()
    except PlanError as error:
        raise PlanError(f"no 1F1B: {error}") from None


class _Halving:
    """Args: as of `halves`."""

    def __init__(self, program: ClosedJaxpr, layers: Mapping[int, Layers], rows: Rows) -> None:
        (first, forward), *others = sorted(layers.items())
        if len(others) != 1 or forward.reverse or not others[0][1].reverse:
            raise PlanError(_TWO)
        ((second, backward),) = others
        self._rows, self._jaxpr, eqns = rows, program.jaxpr, program.jaxpr.eqns
        self._forward, self._backward = forward, backward
        self._there, self._back = eqns[first], eqns[second]
        self._eqns = [eqn for eqn in eqns if eqn is not self._there and eqn is not self._back]
        carried = backward.scan.parts(self._back.invars)[1]
        self._turning = {n: carried[n] for n in backward.carried("rows")}
        outs = self._there.outvars
        self._passed = {outs[n] for n in forward.carried("rows")}
        self._stacks = {outs[n] for n in forward.stacked("rows")}
        self._sums = {outs[n] for n, kind in enumerate(forward.left) if kind == "sum"}

    def halves(self) -> Halves:
        self._check_stacks()
        if not _reached(self._jaxpr.eqns, self._sums).isdisjoint(self._back.outvars):
            raise PlanError(_SUMS)
        late = _reached(self._eqns, {*self._sums, *self._back.outvars})
        between = self._between(late)
        kinds = Kinds(self._rows)
        inside = {v for eqn in between if not self._is_cheap(eqn) for v in eqn.outvars}
        made = {var for eqn in between for var in eqn.outvars}
        given = dict.fromkeys(v for e in between for v in variables(e.invars) if v not in made)
        kinds.read_step(self._jaxpr.replace(constvars=[], invars=list(given), eqns=between), set())
        self._check_back({var: kinds.of[var] for var in inside})
        placed = list(zip(between, kinds.where, strict=True))
        later = {id(eqn) for eqn, where in placed if where == "after"}
        eqns: dict[When, list[Any]] = {"before": [], "ahead": [], "between": [], "after": []}
        eqns["between"] = [eqn for eqn, where in placed if where == "loop"]
        own = {id(eqn) for eqn in eqns["between"] if not self._is_cheap(eqn)}
        waiting = _reached(self._eqns, {*self._there.outvars} - self._passed - self._sums)
        for eqn in self._eqns:
            if id(eqn) in later or not late.isdisjoint(eqn.outvars):
                eqns["after"].append(eqn)
            elif id(eqn) not in own:
                eqns["before" if waiting.isdisjoint(eqn.outvars) else "ahead"].append(eqn)
        return Halves(self._forward, self._backward, eqns, kinds.of, self._turning)

    def _between(self, late: set[Var]) -> list[Any]:
        """What is made of the layers' last rows, and of others for that alone."""
        middle = _reached(self._eqns, self._passed) - late
        wanted, others = {*self._turning.values()}, {*self._jaxpr.outvars}
        others.update(variables((*self._there.invars, *self._back.invars)))
        others -= wanted
        found = []
        dims = self._rows.dims
        for eqn in reversed(self._eqns):
            is_own = wanted.issuperset(eqn.outvars) and others.isdisjoint(eqn.outvars)
            is_row = all(any(v in dims for v in variables(s)) for s in (eqn.invars, eqn.outvars))
            is_late = not late.isdisjoint(eqn.outvars)
            if not is_late and (
                not middle.isdisjoint(eqn.outvars)
                or (is_own and is_row and not eqn.effects and is_by_row(eqn, dims))
                or (self._is_cheap(eqn) and not wanted.isdisjoint(eqn.outvars))
            ):
                found.append(eqn)
                wanted.update(variables(eqn.invars))
            else:
                others.update(variables(eqn.invars))
        return found[::-1]

    def _is_cheap(self, eqn: Any) -> bool:
        """Whether it makes rows of what has none, or zeros and the like: there may be two of it."""
        if eqn.primitive.name != "broadcast_in_dim":
            return False
        dims, given = self._rows.dims, variables(eqn.invars)
        return not given or (eqn.outvars[0] in dims and not any(var in dims for var in given))

    def _check_stacks(self) -> None:
        """What layers leave of rows is gone over on the way back alone."""
        constants, carried, _ = self._backward.scan.parts(self._back.invars)
        others: list[Any] = [eqn.invars for eqn in self._jaxpr.eqns if eqn is not self._back]
        others += [constants, carried, self._jaxpr.outvars]
        if not self._stacks.isdisjoint(variables([*chain.from_iterable(others)])):
            raise PlanError(_STACKS)

    def _check_back(self, made: Mapping[Var, Kind]) -> None:
        """The way back is given nothing of a microbatch but the rows that go through it."""
        constants, carried, over = self._backward.scan.parts(self._back.invars)
        for var in variables([*constants, *carried, *over]):
            kind = made.get(var, "rows" if var in self._passed else "same")
            if kind in ("sum", "after", "each"):
                raise PlanError(_SUMS)
        for var in variables([*constants, *over]):
            if made.get(var) == "rows" or var in self._passed:
                raise PlanError(_MORE)


def _reached(eqns: Sequence[Any], of: set[Var]) -> set[Var]:
    """All that is made of some variables, and they."""
    found = set(of)
    for eqn in eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found
