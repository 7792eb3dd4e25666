"""A step written anew as its plan has it: in microbatches, with activations made again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nbdist.worker.microbatches import in_parts
from nbdist.worker.rematerialise import rematerialised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.plan.model import Role
    from nbdist.records import Remat


def rewritten(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], remat: Remat, micro: int
) -> ClosedJaxpr:
    """A step's jaxpr.

    Args:
        closed: as it was traced.
        inputs: of each of its inputs, the path and the role.
        remat: what is made again.
        micro: in how many parts the batch is gone through.

    Raises:
        PlanError: it cannot be gone through in parts.
    """
    if micro > 1:
        closed = in_parts(closed, inputs, micro)
    return rematerialised(closed, inputs, remat) if remat else closed


def rewriting(step: Callable[..., Any], remat: Remat, micro: int) -> Callable[..., Any]:
    """The step itself. Its last argument is a batch; a smaller one may have fewer parts."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        batch = jax.tree.leaves(args[-1])
        rows = max((leaf.shape[0] for leaf in batch if leaf.shape), default=1)
        leaves = jax.tree.leaves(args)
        first = len(leaves) - len(batch)
        inputs: list[tuple[str, Role]] = [
            ("", "batch" if place >= first else "carried") for place in range(len(leaves))
        ]
        made = rewritten(closed, inputs, remat, math.gcd(rows, micro))
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(made)(*leaves))

    return run
