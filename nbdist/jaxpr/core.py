"""Parts of JAX's programs that differ between its versions.

JAX 0.11 merged `ClosedJaxpr` into `Jaxpr` and describes the inputs and outputs of a scan by trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr

from nbdist.private_api.jax import (
    DropVar,
    concrete_or_error,
    jaxprs_in_params,
    new_jaxpr_eqn,
    unmapped_aval,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

__all__ = [
    "DropVar",
    "concrete_or_error",
    "jaxprs_in_params",
    "lowered",
    "new_jaxpr_eqn",
    "scan_counts",
    "scan_params",
    "unmapped_aval",
]


def lowered(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program with only simple operations.

    From JAX 0.12 on, functions such as `jnp.searchsorted` are one operation, which JAX replaces by
    simple ones when it compiles the program.
    """
    if not getattr(closed.jaxpr, "is_high", False):
        return closed
    from nbdist.private_api.jax import partial_eval

    return partial_eval.lower_jaxpr2(closed)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the number of constants and of carried values of a scan."""
    if "ft_in" not in params:  # JAX 0.8 to 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def scan_params(
    params: dict[str, Any], body: Jaxpr, constants: int | None = None
) -> dict[str, Any]:
    """Return the parameters of a scan with another body, which needs no constants of its own.

    Args:
        params: parameters of the scan.
        body: the new body.
        constants: number of inputs of the body that are the same in each iteration; by default the
            number of the scan.
    """
    before, carried = scan_counts(params)
    constants = before if constants is None else constants
    made = {**params, "jaxpr": ClosedJaxpr(body, [])}
    if "ft_in" not in params:  # JAX 0.8 to 0.10
        return {**made, "num_consts": constants}
    from nbdist.private_api.jax import flattree

    scanned = len(body.invars) - constants - carried
    return {
        **made,
        "ft_in": flattree.pack(tuple(map(flattree.nones, (constants, carried, scanned)))),
        "ft_out": flattree.pack(tuple(map(flattree.nones, (carried, len(body.outvars) - carried)))),
    }
