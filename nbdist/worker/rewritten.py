"""A step written anew as its plan has it: microbatches, stages, activations that are made again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nbdist.worker.microbatches import in_parts
from nbdist.worker.pipelines import piped
from nbdist.worker.rematerialise import rematerialised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.plan.model import Role
    from nbdist.records import Remat


def rewritten(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    remat: Remat,
    micro: int,
    stages: int = 1,
) -> ClosedJaxpr:
    """A step's jaxpr.

    Args:
        closed: as it was traced.
        inputs: of each of its inputs, the path and the role.
        remat: what is made again.
        micro: in how many parts the batch is gone through; the stages', where there are several.
        stages: in how many the layers are cut.

    Raises:
        PlanError: it cannot be gone through in parts, or cut into stages.
    """
    if stages > 1:
        closed = rematerialised(closed, inputs, remat) if remat else closed
        return piped(closed, inputs, stages, micro)
    if micro > 1:
        closed = in_parts(closed, inputs, micro)
    return rematerialised(closed, inputs, remat) if remat else closed


def rewriting(
    step: Callable[..., Any], remat: Remat, micro: int, stages: int = 1
) -> Callable[..., Any]:
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
        parts = math.gcd(rows, micro)  # one would leave all stages but one without work
        made = rewritten(closed, inputs, remat, parts, stages if parts > 1 else 1)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(made)(*leaves))

    return run
