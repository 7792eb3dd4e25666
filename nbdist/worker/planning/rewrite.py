"""Rewrite a step as its plan requires.

Applies microbatches, pipeline stages, rematerialization and shardings of products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nbdist.jaxpr.microbatches import in_parts
from nbdist.jaxpr.pallas_shards import with_sharded_kernels
from nbdist.jaxpr.pipeline.build import as_pipeline, for_stages
from nbdist.jaxpr.remat import rematerialised
from nbdist.jaxpr.sharding_constraints import with_sharded_products
from nbdist.records import GPIPE, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.jaxpr.sharding_constraints import MeshLayout
    from nbdist.planner.graph.model import Role
    from nbdist.records import Remat


def rewritten(
    closed: ClosedJaxpr,
    inputs: Sequence[tuple[str, Role]],
    remat: Remat,
    micro: int,
    stages: int = 1,
    layout: MeshLayout | None = None,
    staging: Staging = GPIPE,
    places: int = 1,
) -> ClosedJaxpr:
    """Rewrite the jaxpr of a step.

    Args:
        closed: Traced jaxpr.
        inputs: Path and role of each input.
        remat: Rematerialization of activations.
        micro: Number of microbatches; with several stages, those of the pipeline.
        stages: Number of pipeline stages.
        layout: Shardings of products and kernels; None if XLA needs none.
        staging: Pipeline schedule.
        places: Size of the data axis of the context mesh, to add sums over microbatches once.

    Raises:
        PlanError: The batch cannot be split into microbatches, or the layers into stages.
    """
    traced = closed
    if stages > 1:
        closed = for_stages(closed, inputs)
    elif micro > 1:
        closed = in_parts(closed, inputs, micro, places)
    stacks_layers = stages > 1 and closed is not traced
    if remat:
        closed = rematerialised(closed, inputs, remat)
    if layout is not None and layout.products:
        closed = with_sharded_products(closed, inputs, layout)
    if layout is not None and layout.kernels:
        closed = with_sharded_kernels(closed, inputs, layout.mesh, layout.specs)
    if stages == 1:
        return closed
    return as_pipeline(closed, inputs, stages, micro, staging, stacks_layers=stacks_layers)


def rewriting(
    step: Callable[..., Any],
    remat: Remat,
    micro: int,
    stages: int = 1,
    layout: MeshLayout | None = None,
    staging: Staging = GPIPE,
    places: int = 1,
) -> Callable[..., Any]:
    """Return a step that rewrites itself; smaller batches (its last argument) use fewer parts."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        batch = jax.tree.leaves(args[-1])
        rows = max((leaf.shape[0] for leaf in batch if leaf.shape), default=1)
        leaves = jax.tree.leaves(args)
        first = len(leaves) - len(batch)
        inputs: list[tuple[str, Role]] = [
            ("", "batch" if place >= first else "carried") for place in range(len(leaves))
        ]
        parts = math.gcd(rows, micro)  # with one part, all stages but one would idle
        own = stages if parts > 1 else 1
        rounds = staging.rounds if parts % stages == 0 else 1  # a batch with fewer rows
        now = staging._replace(rounds=rounds)
        made = rewritten(closed, inputs, remat, parts, own, layout, now, places)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(made)(*leaves))

    return run
