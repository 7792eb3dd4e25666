"""Detection and analysis of scans over layers in a step.

In a scan over layers, rows of the batch pass from iteration to iteration, and each iteration has
its own parameters. The scan of the backward pass goes over the stacks of the first one. In a scan
over time, by contrast, each iteration has its own rows.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var

from nbdist.errors import PlanError
from nbdist.jaxpr.core import jaxprs_in_params, scan_counts, scan_params
from nbdist.jaxpr.flatten import OPEN, inline_checkpoints, inner_equations, variables
from nbdist.jaxpr.microbatches import Kinds
from nbdist.jaxpr.pallas_calls import NAME
from nbdist.jaxpr.pipeline.random_draws import without_draws
from nbdist.jaxpr.remat_scans import Scan, is_scan, scan_of
from nbdist.planner.graph.fusion import ADDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.microbatches import Kind, Rows
    from nbdist.planner.graph.model import Role

_NONE = (
    "there is no scan over layers to divide into stages, and no chain of equal layers: stack the "
    "parameters of equal layers, [layers, ...], and write x, _ = jax.lax.scan(lambda x, layer: "
    "(apply(layer, x), None), x, stacked)"
)
_WITHIN = (
    "the scan over layers is inside a jax.checkpoint: checkpoint the layer "
    "instead, jax.lax.scan(jax.checkpoint(layer), x, stacked)"
)
_KERNELS = (
    "a step with Pallas kernels is not divided into stages: use no stages, or attention without "
    "such a kernel"
)


class NoScanError(PlanError):
    """A step without a scan over layers."""


class Layers(NamedTuple):
    """A scan over layers.

    Attributes:
        scan: the equation and its parts.
        input_kinds: kind of each input of its body: rows, a sum over rows that layers add to, or
            the same for all rows.
        result_kinds: kind of each result of its body.
        microbatch_body: its body for the rows of one microbatch.
        draws: program of the random draws, which runs on the whole batch; the scan goes over its
            results last.
    """

    scan: Scan
    input_kinds: tuple[Kind, ...]
    result_kinds: tuple[Kind, ...]
    microbatch_body: Jaxpr
    draws: Jaxpr

    @property
    def length(self) -> int:
        """Number of layers."""
        length: int = self.scan.eqn.params["length"]
        return length

    @property
    def reverse(self) -> bool:
        """True for a backward pass."""
        return bool(self.scan.eqn.params["reverse"])

    def carried(self, kind: Kind) -> list[int]:
        """Return the numbers of carried results of a kind."""
        return [n for n in range(self.scan.carried) if self.result_kinds[n] == kind]

    def stacked(self, kind: Kind) -> list[int]:
        """Return the numbers of stacked results of a kind."""
        return [
            n
            for n in range(self.scan.carried, len(self.result_kinds))
            if self.result_kinds[n] == kind
        ]


def check_has_scan(jaxpr: Jaxpr) -> None:
    """Check that a program, or one that it calls, contains a scan.

    Raises:
        NoScanError: the step has no such scan.
    """
    todo, seen = [jaxpr], {id(jaxpr)}
    while todo:
        for eqn in todo.pop().eqns:
            if is_scan(eqn):
                return
            inner = [body for body in jaxprs_in_params(eqn.params) if id(body) not in seen]
            seen.update(map(id, inner))
            todo += inner
    raise NoScanError(_NONE)


def over_layers(
    program: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], dims: Mapping[Var, tuple[int, ...]]
) -> dict[int, Scan]:
    """Return the scans over layers of a flat program, by their positions.

    Args:
        program: the step.
        inputs: path and role of each input.
        dims: the dimensions that are rows, by variable.

    Raises:
        NoScanError: the step has no scan over layers.
        PlanError: stages cannot run its scans.
    """
    jaxpr = program.jaxpr
    own = [v for v, (_, role) in zip(jaxpr.invars, inputs, strict=True) if role != "batch"]
    learned = {*own, *jaxpr.constvars}.difference(dims)
    found = _scans(jaxpr, dims, learned)
    if any(eqn.primitive.name == NAME for eqn in chain(jaxpr.eqns, inner_equations(jaxpr))):
        raise PlanError(_KERNELS)
    if any(_holds_layers(eqn, dims, learned) for eqn in jaxpr.eqns):
        raise PlanError(_WITHIN)
    if not found:
        raise NoScanError(_NONE)
    return found


def _scans(jaxpr: Jaxpr, dims: Mapping[Var, Any], learned: set[Var]) -> dict[int, Scan]:
    """Return the scans over layers of a program, by their positions.

    Args:
        jaxpr: the program.
        dims: variables with rows.
        learned: the step's carried values without rows; values computed from them are added.
    """
    stacks: set[Var] = set()
    found = {}
    for place, eqn in enumerate(jaxpr.eqns):
        if is_scan(eqn) and _is_over_layers(scan_of(eqn), dims, learned, stacks):
            found[place] = scan_of(eqn)
            stacks.update(v for v in eqn.outvars[scan_counts(eqn.params)[1] :] if v in dims)
        if not learned.isdisjoint(variables(eqn.invars)):
            learned.update(v for v in eqn.outvars if v not in dims)
    return found


def _is_over_layers(
    scan: Scan, dims: Mapping[Var, Any], learned: set[Var], stacks: set[Var]
) -> bool:
    """Return True if rows pass from iteration to iteration, and iterations have own parameters.

    An iteration has rows of its own only in a backward pass. A scan of one layer does not count.
    """
    _, carried, over = (variables(part) for part in scan.parts(scan.eqn.invars))
    if scan.eqn.params["length"] == 1 or not any(var in dims for var in carried):
        return False
    rows = [var for var in over if var in dims]
    if rows:
        return any(var in stacks for var in rows)
    avals: list[Any] = [var.aval for var in over if var in learned]
    return any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


def _holds_layers(eqn: Any, dims: Mapping[Var, Any], learned: set[Var]) -> bool:
    """Return True if it is a checkpoint that contains a scan over layers."""
    if eqn.primitive.name not in OPEN:
        return False
    inner = eqn.params["jaxpr"]
    pairs = zip(inner.invars, eqn.invars, strict=True)
    own = {var for var, outer in pairs if not isinstance(outer, Literal) and outer in learned}
    return bool(_scans(inner, dims, own))


def read(scan: Scan, rows: Rows) -> Layers:
    """Analyse a scan over layers.

    Args:
        scan: the scan.
        rows: rows of the step and their parts; rows of random draws are added.

    Raises:
        PlanError: the scan cannot run on parts of the rows.
    """
    # Checkpoints are not needed: recomputed values are in another loop than the first ones.
    scan = _with_body(scan, inline_checkpoints(scan.body))
    scan = _with_body(scan, _parted(scan, _mixed(scan, rows.dims)))
    scan, draws, dims = without_draws(scan, rows.dims, _mixed(scan, rows.dims))
    rows.dims.update(dims)
    try:
        carried, outs = _kinds(scan, rows)
        few = rows.fewer(scan.body)
    except PlanError as error:
        raise PlanError(
            f"the scan over {scan.eqn.params['length']} layers cannot run in microbatches: {error}"
        ) from None
    over = [_given(var, rows) for var in scan.body.invars]
    first, second = scan.constants, scan.constants + scan.carried
    given = [*over[:first], *carried, *over[second:]]
    left = [*carried, *outs[scan.carried :]]
    return Layers(scan, tuple(map(_settled, given)), tuple(map(_settled, left)), few, draws)


def _with_body(scan: Scan, body: Jaxpr) -> Scan:
    return scan_of(scan.eqn.replace(params=scan_params(scan.eqn.params, body)))


def _parted(scan: Scan, mixed: set[Var]) -> Jaxpr:
    """Return the body with separate barriers for values with and without rows.

    Values without rows are computed in advance.
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
    """Return the kinds of carried values and of all results of the body."""
    body, kinds = scan.body, Kinds(rows)
    mixed = _mixed(scan, rows.dims)
    constants, carry, over = scan.parts([_given(var, rows) for var in body.invars])
    # Each stage adds to its own zeros, so that sums start as zeros.
    carry = [
        "zero" if kind == "same" and var in mixed else kind
        for kind, var in zip(carry, scan.parts(body.invars)[1], strict=True)
    ]
    while True:
        outs = kinds.read(body, [*constants, *carry, *over])
        now = [_kind_in_layers(*pair) for pair in zip(carry, outs, strict=False)]
        if now == carry:
            break
        carry = now
    for number, kind in enumerate(carry):
        if kind == "sum" and not _is_added_to(scan, number):
            raise PlanError(
                "a layer reads a sum over all rows of the batch, which is complete only after the "
                "last microbatch: only add to the sum in a layer, and read it after the scan"
            )
    return carry, outs


def _mixed(scan: Scan, dims: Mapping[Var, Any]) -> set[Var]:
    """Return the variables of the body that depend on rows, in this iteration or a later one."""
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


def _kind_in_layers(before: Kind, after: Kind) -> Kind:
    """Return the kind of a carried value."""
    if before == after or (before, after) == ("same", "zero"):
        return before
    if (before, after) == ("zero", "sum"):
        return "sum"
    raise PlanError(
        "a layer passes on a value that is neither rows of the batch nor a sum over rows"
    )


def _is_added_to(scan: Scan, number: int) -> bool:
    """Return True if layers only add to a carried value."""
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
        elif eqn.primitive.name in ADDS and sum(v in reached for v in variables(eqn.invars)) == 1:
            (at,) = (var for var in variables(eqn.invars) if var in reached)
        else:
            return False
    return True


def _is_no_change(eqn: Any) -> bool:
    """Return True if a conversion only changes JAX's weak type."""
    is_conversion = eqn.primitive.name == "convert_element_type"
    return bool(is_conversion and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _flows(body: Jaxpr) -> Iterator[tuple[Var, list[Var]]]:
    """Yield each variable with the results that depend on it; a barrier keeps its values apart."""
    for eqn in body.eqns:
        apart = eqn.primitive.name == "optimization_barrier"
        for place, var in enumerate(eqn.invars):
            if not isinstance(var, Literal):
                yield var, [eqn.outvars[place]] if apart else list(eqn.outvars)
