"""Scans over layers: which of a step's scans they are, and what goes through them.

In a scan over layers the rows of the batch go from round to round, and each round has parameters of
its own; the scan that JAX makes of its backward pass goes over what the first one stacks. In a scan
over time each round has rows of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Literal, Var

from nbdist.errors import PlanError
from nbdist.jaxpr.flatten import OPEN, opened, variables
from nbdist.jaxpr.microbatches import Kinds
from nbdist.jaxpr.pipeline.random_draws import without_draws
from nbdist.jaxpr.remat_scans import Scan, is_scan, scan_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.microbatches import Kind, Rows
    from nbdist.planner.graph.model import Role

_ADDS = frozenset(("add", "add_any"))
_NONE = (
    "there is no scan over layers to cut into stages: stack the parameters of equal layers, "
    "[layers, ...], and write x, _ = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x, "
    "stacked)"
)
_WITHIN = (
    "the scan over layers is within a jax.checkpoint: put the checkpoint around what the scan "
    "applies, jax.lax.scan(jax.checkpoint(layer), x, stacked)"
)


class Layers(NamedTuple):
    """A scan over layers.

    Attributes:
        scan: its parts.
        given: of each input of its body, if it has rows; is a sum over rows, to which each layer
            adds; or is the same whatever the rows are.
        left: the same of what its body leaves.
        few: its body, for the rows of a microbatch.
        draws: what it goes over last of all, of what it was given before: on the whole batch.
    """

    scan: Scan
    given: tuple[Kind, ...]
    left: tuple[Kind, ...]
    few: Jaxpr
    draws: Jaxpr

    @property
    def length(self) -> int:
        """How many layers."""
        length: int = self.scan.eqn.params["length"]
        return length

    @property
    def reverse(self) -> bool:
        """Whether it is a backward pass."""
        return bool(self.scan.eqn.params["reverse"])

    def carried(self, kind: Kind) -> list[int]:
        """What goes from layer to layer, by the number of the output."""
        return [n for n in range(self.scan.carried) if self.left[n] == kind]

    def stacked(self, kind: Kind) -> list[int]:
        """What each layer leaves, by the number of the output."""
        return [n for n in range(self.scan.carried, len(self.left)) if self.left[n] == kind]


def over_layers(
    program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], dims: Mapping[Var, tuple[int, ...]]
) -> dict[int, Scan]:
    """The scans over layers of a flat program, by their places in it.

    Args:
        program: the step.
        inputs: of each of its inputs, the path and the role.
        dims: of variables that have rows, which dimensions they are.

    Raises:
        PlanError: there are none.
    """
    jaxpr = program.jaxpr
    own = [v for v, (_, role) in zip(jaxpr.invars, inputs, strict=True) if role != "batch"]
    learned = {*own, *jaxpr.constvars}.difference(dims)
    found = _scans(jaxpr, dims, learned)
    if any(_holds_layers(eqn, dims, learned) for eqn in jaxpr.eqns):
        raise PlanError(_WITHIN)
    if not found:
        raise PlanError(_NONE)
    return found


def _scans(jaxpr: Jaxpr, dims: Mapping[Var, Any], learned: set[Var]) -> dict[int, Scan]:
    """The scans over layers of a program.

    Args:
        jaxpr: the program.
        dims: of variables that have rows.
        learned: variables that are no rows, and the step's own; what is made of them is added.
    """
    stacks: set[Var] = set()
    found = {}
    for place, eqn in enumerate(jaxpr.eqns):
        if is_scan(eqn) and _is_over_layers(scan_of(eqn), dims, learned, stacks):
            found[place] = scan_of(eqn)
            stacks.update(v for v in eqn.outvars[eqn.params["num_carry"] :] if v in dims)
        if not learned.isdisjoint(variables(eqn.invars)):
            learned.update(v for v in eqn.outvars if v not in dims)
    return found


def _is_over_layers(
    scan: Scan, dims: Mapping[Var, Any], learned: set[Var], stacks: set[Var]
) -> bool:
    """Rows go from round to round; a round has rows of its own only in a backward pass.

    One layer alone is none: it is done by all stages.
    """
    _, carried, over = (variables(part) for part in scan.parts(scan.eqn.invars))
    if scan.eqn.params["length"] == 1 or not any(var in dims for var in carried):
        return False
    rows = [var for var in over if var in dims]
    if rows:
        return any(var in stacks for var in rows)
    return any(var in learned and _is_inexact(var) for var in over)


def _is_inexact(var: Var) -> bool:
    aval: Any = var.aval
    return str(aval.dtype).startswith(("float", "bfloat", "complex"))


def _holds_layers(eqn: Any, dims: Mapping[Var, Any], learned: set[Var]) -> bool:
    """Whether it is a checkpoint with a scan over layers in it."""
    if eqn.primitive.name not in OPEN:
        return False
    held = eqn.params["jaxpr"]
    pairs = zip(held.invars, eqn.invars, strict=True)
    own = {inner for inner, outer in pairs if not isinstance(outer, Literal) and outer in learned}
    return bool(_scans(held, dims, own))


def read(scan: Scan, rows: Rows) -> Layers:
    """What goes through a scan over layers.

    Args:
        scan: the scan.
        rows: where it has rows, and in how many parts they are gone through; what is drawn for
            each row is added.

    Raises:
        PlanError: it cannot go through them part by part.
    """
    # A checkpoint has done its work: what is made again is in another loop than what was made.
    scan = _with_body(scan, opened(scan.body))
    scan = _with_body(scan, _parted(scan, _mixed(scan, rows.dims)))
    scan, draws, dims = without_draws(scan, rows.dims, _mixed(scan, rows.dims))
    rows.dims.update(dims)
    try:
        carried, outs = _kinds(scan, rows)
        few = rows.fewer(scan.body)
    except PlanError as error:
        raise PlanError(
            f"the scan over {scan.eqn.params['length']} layers cannot go through the batch in "
            f"microbatches: {error}"
        ) from None
    over = [_given(var, rows) for var in scan.body.invars]
    first, second = scan.constants, scan.constants + scan.carried
    given = [*over[:first], *carried, *over[second:]]
    left = [*carried, *outs[scan.carried :]]
    return Layers(scan, tuple(map(_settled, given)), tuple(map(_settled, left)), few, draws)


def _with_body(scan: Scan, body: Jaxpr) -> Scan:
    params = {**scan.eqn.params, "jaxpr": ClosedJaxpr(body, [])}
    return scan_of(scan.eqn.replace(params=params))


def _parted(scan: Scan, mixed: set[Var]) -> Jaxpr:
    """Its body, with barriers of their own for what depends on rows and for what does not.

    Of the latter all is made beforehand, without the rows.
    """
    eqns: list[Any] = []
    for eqn in scan.body.eqns:
        if eqn.primitive.name != "optimization_barrier":
            eqns.append(eqn)
            continue
        pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
        for has_rows in (False, True):
            own = [pair for pair in pairs if (pair[1] in mixed) == has_rows]
            if own:
                ins, outs = zip(*own, strict=True)
                eqns.append(eqn.replace(invars=list(ins), outvars=list(outs)))
    return scan.body.replace(eqns=eqns)


def _given(var: Var, rows: Rows) -> Kind:
    return "rows" if var in rows.dims else "same"


def _settled(kind: Kind) -> Kind:
    return "same" if kind == "zero" else kind


def _kinds(scan: Scan, rows: Rows) -> tuple[list[Kind], list[Kind]]:
    """Of what it carries, and of all that its body leaves."""
    body, kinds = scan.body, Kinds(rows)
    mixed = _mixed(scan, rows.dims)
    constants, carry, over = scan.parts([_given(var, rows) for var in body.invars])
    # Each stage adds to zeros of its own: so sums are zeros to begin with.
    carry = [
        "zero" if kind == "same" and var in mixed else kind
        for kind, var in zip(carry, scan.parts(body.invars)[1], strict=True)
    ]
    while True:
        outs = kinds.read(body, [*constants, *carry, *over])
        now = [_joined(*pair) for pair in zip(carry, outs, strict=False)]
        if now == carry:
            break
        carry = now
    for number, kind in enumerate(carry):
        if kind == "sum" and not _is_added_to(scan, number):
            raise PlanError("a layer does more with a sum over all rows than to add to it")
    return carry, outs


def _mixed(scan: Scan, dims: Mapping[Var, Any]) -> set[Var]:
    """The body's variables that depend on rows, in this round or a later one."""
    body = scan.body
    found, before = {var for var in body.invars if var in dims}, -1
    while before != len(found):
        before = len(found)
        for var, outs in _flows(body):
            if var in found:
                found.update(outs)
        ins = scan.parts(body.invars)[1]
        pairs = zip(ins, body.outvars, strict=False)
        found.update(var for var, out in pairs if not isinstance(out, Literal) and out in found)
    return found


def _joined(before: Kind, after: Kind) -> Kind:
    """Of what it carries."""
    if before == after or (before, after) == ("same", "zero"):
        return before
    if (before, after) == ("zero", "sum"):
        return "sum"
    raise PlanError("a layer passes on what is neither rows of the batch nor a sum over them")


def _is_added_to(scan: Scan, number: int) -> bool:
    """Whether all that is done with a value that it carries is to add to it."""
    body = scan.body
    carried = scan.parts(body.invars)[1][number]
    reached = {carried}
    for var, outs in _flows(body):
        if var in reached:
            reached.update(outs)
    others = variables([out for place, out in enumerate(body.outvars) if place != number])
    if not reached.isdisjoint(others):
        return False
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    at: Any = body.outvars[number]
    while at is not carried:
        eqn = None if isinstance(at, Literal) else makers.get(at)
        if eqn is None:
            return False
        if eqn.primitive.name == "optimization_barrier":
            at = eqn.invars[eqn.outvars.index(at)]
        elif _is_no_change(eqn):
            (at,) = eqn.invars
        elif eqn.primitive.name in _ADDS and sum(v in reached for v in variables(eqn.invars)) == 1:
            (at,) = (var for var in variables(eqn.invars) if var in reached)
        else:
            return False
    return True


def _is_no_change(eqn: Any) -> bool:
    """Of a Python number JAX says that its type is weak, and then that it is not."""
    is_conversion = eqn.primitive.name == "convert_element_type"
    return bool(is_conversion and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _flows(body: Jaxpr) -> Iterator[tuple[Var, list[Var]]]:
    """What each variable is used for; a barrier keeps its values apart."""
    for eqn in body.eqns:
        apart = eqn.primitive.name == "optimization_barrier"
        for place, var in enumerate(eqn.invars):
            if not isinstance(var, Literal):
                yield var, [eqn.outvars[place]] if apart else list(eqn.outvars)
