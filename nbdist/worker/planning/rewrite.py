"""A step written anew as its plan has it.

In microbatches, in stages, with activations that are made again, with products that are laid out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nbdist.jaxpr.microbatches import in_parts
from nbdist.jaxpr.pipeline.build import piped
from nbdist.jaxpr.remat import rematerialised
from nbdist.jaxpr.sharding_constraints import with_sharded_products
from nbdist.records import GPIPE, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.jaxpr.sharding_constraints import Lie
    from nbdist.planner.graph.model import Role
    from nbdist.records import Remat


def rewritten(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    remat: Remat,
    micro: int,
    stages: int = 1,
    lie: Lie | None = None,
    staging: Staging = GPIPE,
) -> ClosedJaxpr:
    """A step's jaxpr.

    Args:
        closed: as it was traced.
        inputs: of each of its inputs, the path and the role.
        remat: what is made again.
        micro: in how many parts the batch is gone through; the stages', where there are several.
        stages: in how many the layers are cut.
        lie: how products are laid out, if that is to be said of them.
        staging: how they go through the stages.

    Raises:
        PlanError: it cannot be gone through in parts, or cut into stages.
    """
    if micro > 1 and stages == 1:
        closed = in_parts(closed, inputs, micro)
    if remat:
        closed = rematerialised(closed, inputs, remat)
    if lie is not None:
        closed = with_sharded_products(closed, inputs, lie)
    return piped(closed, inputs, stages, micro, staging) if stages > 1 else closed


def rewriting(
    step: Callable[..., Any],
    remat: Remat,
    micro: int,
    stages: int = 1,
    lie: Lie | None = None,
    staging: Staging = GPIPE,
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
        own = stages if parts > 1 else 1
        rounds = staging.rounds if parts % stages == 0 else 1  # a batch of fewer rows
        now = staging._replace(rounds=rounds)
        made = rewritten(closed, inputs, remat, parts, own, lie, now)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(made)(*leaves))

    return run
