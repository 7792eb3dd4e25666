"""Random draws of layers, such as dropout masks, computed in advance.

A microbatch cannot draw its part of the random numbers of the whole batch. Therefore the numbers of
all layers are drawn before the scan, which iterates over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jax.extend.core import Var

from nbdist.jaxpr.core import scan_params, unmapped_aval
from nbdist.jaxpr.flatten import variables
from nbdist.jaxpr.remat_scans import Scan, scan_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax.extend.core import Jaxpr


class Draws(NamedTuple):
    """A scan over layers without its random draws.

    Attributes:
        scan: it goes over the draws as its last inputs.
        program: computes the draws from the inputs of the scan's body.
        dims: the dimensions that are rows, by stack of draws.
    """

    scan: Scan
    program: Jaxpr
    dims: dict[Var, tuple[int, ...]]


def without_draws(scan: Scan, dims: Mapping[Var, tuple[int, ...]], mixed: set[Var]) -> Draws:
    """Move random draws with rows out of a scan over layers.

    Args:
        scan: the scan.
        dims: the dimensions that are rows, by variable.
        mixed: variables of its body that depend on rows.
    """
    body = scan.body
    drawn: set[Var] = set()
    rest = []
    for eqn in body.eqns:
        is_apart = mixed.isdisjoint(eqn.outvars) and not eqn.effects
        if is_apart and (_draws(eqn, dims) or not drawn.isdisjoint(variables(eqn.invars))):
            drawn.update(eqn.outvars)
        else:
            rest.append(eqn)
    used = [*(var for eqn in rest for var in variables(eqn.invars)), *variables(body.outvars)]
    border = list(dict.fromkeys(var for var in used if var in drawn))
    if any(var not in dims for var in border):
        border = []
    if not border:
        return Draws(scan, body.replace(outvars=[]), {})
    stacks = [Var(unmapped_aval(scan.eqn.params["length"], 0, var.aval)) for var in border]
    without = body.replace(invars=[*body.invars, *border], eqns=rest)
    eqn = scan.eqn.replace(
        invars=[*scan.eqn.invars, *stacks],
        params=scan_params(scan.eqn.params, without),
    )
    rows = {
        stack: tuple(dim + 1 for dim in dims[var])
        for stack, var in zip(stacks, border, strict=True)
    }
    return Draws(scan_of(eqn), body.replace(outvars=border), rows)


def _draws(eqn: Any, dims: Mapping[Var, Any]) -> bool:
    """Return True if it makes different rows from inputs without rows."""
    makes = any(var in dims for var in eqn.outvars)
    makes = makes and not any(var in dims for var in variables(eqn.invars))
    return makes and bool(eqn.primitive.name != "broadcast_in_dim")
