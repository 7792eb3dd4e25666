"""The loss section: operations between the layers' forward pass and their backward pass.

Under 1F1B it runs on one microbatch at a time. Operations before and after the layers run on the
whole batch.
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
from nbdist.planner.graph.one_f_one_b import Flow, joined, reached

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.jaxpr.microbatches import Kind, Rows
    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.planner.graph.model import Role

When = Literal["before", "ahead", "loss_section", "after"]
"""Time at which an operation runs. `before`: first, on the whole batch. `ahead`: on the whole
batch, from results of the layers without rows. `loss_section`: on each microbatch. `after`: last,
on the whole batch."""

_TWO = "the step needs exactly one scan over layers and its backward pass"
_STACKS = "stacked results of layers are used outside of the backward pass"
_SUMS = "the backward pass needs a sum over all rows of the layers' results"
_MORE = "the backward pass reads rows of a microbatch other than carried ones"


class DividedStep(NamedTuple):
    """A step, divided into its layers and other operations.

    Attributes:
        forward: the layers in the forward pass.
        backward: the layers in the backward pass.
        eqns: other operations by time; an operation that repeats a value may be in two lists.
        kinds: kinds of the values of the loss section.
        backward_inputs: inputs of the backward pass, by the number of the carried value.
    """

    forward: Layers
    backward: Layers
    eqns: dict[When, list[Any]]
    kinds: dict[Var, Kind]
    backward_inputs: dict[int, Var]


def without_early_barriers(program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]]) -> ClosedJaxpr:
    """Return a flat program whose barriers do not delay values that are independent of the layers.

    Barriers of rematerialized values in the backward pass also delay their inputs, such as masks
    and labels; here, these inputs are available earlier.

    Args:
        program: the step.
        inputs: path and role of each input.

    Raises:
        PlanError: the step has barriers and no scan over layers.
    """
    jaxpr = program.jaxpr
    if not any(eqn.primitive.name == "optimization_barrier" for eqn in jaxpr.eqns):
        return program
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


def divide_step(program: ClosedJaxpr, layers: Mapping[int, Layers], rows: Rows) -> DividedStep:
    """Divide a step into its layers and other operations.

    Args:
        program: the step, flat.
        layers: its scans over layers, by their positions.
        rows: its rows.

    Raises:
        PlanError: the layers are not one scan and its backward pass, or a microbatch must wait for
            all others before its backward pass.
    """
    try:
        return _StepDivider(program, layers, rows).divide_step()
    except PlanError as error:
        raise PlanError(f"schedule=1f1b is not possible: {error}; use schedule=gpipe") from None


class _StepDivider:
    """The state of `divide_step`, with the same arguments."""

    def __init__(self, program: ClosedJaxpr, layers: Mapping[int, Layers], rows: Rows) -> None:
        (first, forward), *others = sorted(layers.items())
        if len(others) != 1 or forward.reverse or not others[0][1].reverse:
            raise PlanError(_TWO)
        ((second, backward),) = others
        self._rows, self._jaxpr, eqns = rows, program.jaxpr, program.jaxpr.eqns
        self._forward, self._backward = forward, backward
        self._forward_scan, self._backward_scan = eqns[first], eqns[second]
        self._eqns = [
            eqn for eqn in eqns if eqn is not self._forward_scan and eqn is not self._backward_scan
        ]
        carried = backward.scan.parts(self._backward_scan.invars)[1]
        self._backward_inputs = {n: carried[n] for n in backward.carried("rows")}
        outs = self._forward_scan.outvars
        self._passed = {outs[n] for n in forward.carried("rows")}
        self._stacks = {outs[n] for n in forward.stacked("rows")}
        self._sums = {outs[n] for n, kind in enumerate(forward.result_kinds) if kind == "sum"}

    def divide_step(self) -> DividedStep:
        self._check_stacks()
        if not reached(_flows(self._jaxpr.eqns), self._sums).isdisjoint(
            self._backward_scan.outvars
        ):
            raise PlanError(_SUMS)
        flows = _flows(self._eqns)
        late = reached(flows, {*self._sums, *self._backward_scan.outvars})
        loss_section = self._loss_section(flows, late)
        kinds = Kinds(self._rows)
        inside = {v for eqn in loss_section if not self._is_cheap(eqn) for v in eqn.outvars}
        made = {var for eqn in loss_section for var in eqn.outvars}
        given = dict.fromkeys(v for e in loss_section for v in variables(e.invars) if v not in made)
        kinds.read_step(
            self._jaxpr.replace(constvars=[], invars=list(given), eqns=loss_section), set()
        )
        self._check_back({var: kinds.of[var] for var in inside})
        placed = list(zip(loss_section, kinds.where, strict=True))
        later = {id(eqn) for eqn, where in placed if where == "after"}
        eqns: dict[When, list[Any]] = {"before": [], "ahead": [], "loss_section": [], "after": []}
        eqns["loss_section"] = [eqn for eqn, where in placed if where == "loop"]
        own = {id(eqn) for eqn in eqns["loss_section"] if not self._is_cheap(eqn)}
        waiting = reached(flows, {*self._forward_scan.outvars} - self._passed - self._sums)
        for eqn in self._eqns:
            if id(eqn) in later or not late.isdisjoint(eqn.outvars):
                eqns["after"].append(eqn)
            elif id(eqn) not in own:
                eqns["before" if waiting.isdisjoint(eqn.outvars) else "ahead"].append(eqn)
        return DividedStep(self._forward, self._backward, eqns, kinds.of, self._backward_inputs)

    def _loss_section(self, flows: Sequence[Flow], late: set[Var]) -> list[Any]:
        wanted, others = {*self._backward_inputs.values()}, {*self._jaxpr.outvars}
        others.update(variables((*self._forward_scan.invars, *self._backward_scan.invars)))
        return joined(
            flows,
            reached(flows, self._passed) - late,
            late,
            others=others - wanted,
            wanted=wanted,
            may_join=self._is_row,
            is_repeatable=self._is_cheap,
        )

    def _is_row(self, eqn: Any) -> bool:
        dims = self._rows.dims
        is_row = all(any(v in dims for v in variables(s)) for s in (eqn.invars, eqn.outvars))
        return is_row and not eqn.effects and is_by_row(eqn, dims)

    def _is_cheap(self, eqn: Any) -> bool:
        """Return True if it broadcasts values without rows, or constants: it may run twice."""
        if eqn.primitive.name != "broadcast_in_dim":
            return False
        dims, given = self._rows.dims, variables(eqn.invars)
        return not given or (eqn.outvars[0] in dims and not any(var in dims for var in given))

    def _check_stacks(self) -> None:
        """Check that only the backward pass uses the stacks of rows that layers leave."""
        constants, carried, _ = self._backward.scan.parts(self._backward_scan.invars)
        others: list[Any] = [
            eqn.invars for eqn in self._jaxpr.eqns if eqn is not self._backward_scan
        ]
        others += [constants, carried, self._jaxpr.outvars]
        if not self._stacks.isdisjoint(variables([*chain.from_iterable(others)])):
            raise PlanError(_STACKS)

    def _check_back(self, made: Mapping[Var, Kind]) -> None:
        """Check that the backward pass gets only carried rows of each microbatch."""
        constants, carried, over = self._backward.scan.parts(self._backward_scan.invars)
        for var in variables([*constants, *carried, *over]):
            kind = made.get(var, "rows" if var in self._passed else "same")
            if kind in ("sum", "after", "each"):
                raise PlanError(_SUMS)
        for var in variables([*constants, *over]):
            if made.get(var) == "rows" or var in self._passed:
                raise PlanError(_MORE)


def _flows(eqns: Sequence[Any]) -> list[Flow]:
    return [Flow(e, frozenset(variables(e.invars)), frozenset(e.outvars)) for e in eqns]
