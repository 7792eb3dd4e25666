"""A scan over layers as a pipeline: stages of layers that microbatches go through.

All stages are at work in each tick, each on its own microbatch: in tick t stage s has microbatch
t - s (GPipe: arXiv:1811.06965). A backward pass goes through the same ticks in their reverse order,
so that it finds in each what the forward pass left there. What stages make in ticks in which they
have no microbatch goes nowhere. The stages are a dimension, cut over an axis of the mesh; what they
pass on is rolled along it, which XLA does with a collective permute.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.records import DATA, STAGE
from nbdist.worker.microbatches import wide
from nbdist.worker.pipeline_ahead import Ahead, Round, ahead
from nbdist.worker.pipeline_rows import Skewed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.layer_scans import Layers
    from nbdist.worker.pipeline_ahead import Arrays
    from nbdist.worker.pipeline_rows import Schedule


class Alike(NamedTuple):
    """What is the same for each row.

    Attributes:
        array: with the rows of a part of a microbatch.
    """

    array: Any


class _Work(NamedTuple):
    """What the layers are given but for what stages pass on, by the numbers of the body's inputs.

    Attributes:
        shared: by all, in all ticks.
        fed: rows that all layers are given: [ticks, stages, parts, ...].
        blocks: each layer's own: [stages, layers of a stage, ...].
        slices: each layer's own rows, as `Skewed` has them.
    """

    shared: Arrays
    fed: Arrays
    blocks: Arrays
    slices: Arrays


class Pipeline:
    """A scan over layers, run in stages.

    Args:
        layers: the scan, with the rows of a part of a microbatch.
        schedule: of the ticks; the layers divide by its stages.
    """

    def __init__(self, layers: Layers, schedule: Schedule) -> None:
        self._layers, self._schedule = layers, schedule
        self._passed, self._stacks = layers.carried("rows"), layers.stacked("rows")
        self._added, self._gradients = layers.carried("sum"), layers.stacked("sum")
        wanted = [*self._passed, *self._added, *self._gradients, *self._stacks]
        self._round = Round(layers.few, wanted)
        last = schedule.stages - 1
        self._enter, self._leave = (last, 0) if layers.reverse else (0, last)

    def run(self, given: Sequence[Any]) -> list[Any]:
        """What the scan leaves.

        Args:
            given: what it is given. Constants that have rows may be `Alike`, and what it goes over
                `Skewed`.

        Returns:
            As the scan; stacks of rows are `Skewed`.
        """
        layers, schedule = self._layers, self._schedule
        first, outs = layers.scan.constants, layers.scan.eqn.outvars
        made = ahead(layers, dict(enumerate(given)))
        entering = {n: schedule.entering(given[first + n], outs[n]) for n in self._passed}
        totals = {n: self._zeros(n) for n in (*self._added, *self._gradients)}
        drawn = [schedule.laid(array, parts=False) for array in made.drawn.values()]
        work = self._work([*given, *drawn], made)
        (_, totals), (rows, stacks) = jax.lax.scan(
            partial(self._tick, work, entering),
            ({n: self._everywhere(array) for n, array in entering.items()}, totals),
            (jnp.arange(schedule.ticks), work.fed, work.slices),
            reverse=layers.reverse,
        )
        left = made.left | {n: Skewed(array) for n, array in stacks.items()}
        left |= {n: self._out(n, array) for n, array in rows.items()}
        left |= {n: self._total(n, totals[n].sum((0, 1)), given[first + n]) for n in self._added}
        left |= {n: self._total(n, self._of_layers(totals[n]), 0) for n in self._gradients}
        return [left[n] for n in range(len(left))]

    def _tick(
        self, work: _Work, entering: Arrays, carry: tuple[Arrays, Arrays], at: Any
    ) -> tuple[Any, Any]:
        """All stages at once."""
        (state, totals), (tick, fed, slices) = carry, at
        schedule = self._schedule
        stage = jnp.arange(schedule.stages)
        is_working = (tick >= stage) & (tick < stage + schedule.micro)
        next_ = jnp.clip(tick - self._enter, 0, schedule.micro - 1)
        state = {
            n: _chosen(stage == self._enter, jax.lax.dynamic_index_in_dim(a, next_), state[n])
            for n, a in entering.items()
        }
        left = self._stages(work.shared, work.blocks, fed, state, slices)
        totals = {
            n: schedule.laid(_chosen(is_working, total + left[n].astype(total.dtype), total))
            for n, total in totals.items()
        }
        rows = {n: schedule.laid(left[n]) for n in self._passed}
        stacks = {n: schedule.laid(left[n]) for n in self._stacks}
        step = -1 if self._layers.reverse else 1
        moved = {n: schedule.laid(jnp.roll(array, step, 0)) for n, array in rows.items()}
        return (moved, totals), (rows, stacks)

    def _stages(self, *given: Arrays) -> Arrays:
        """What the layers leave, [stages, parts, ...], of what `_stage` is given."""
        axis = DATA if self._schedule.parts > 1 else None
        parts = jax.vmap(self._stage, in_axes=(None, None, 0, 0, 0), spmd_axis_name=axis)
        stages = jax.vmap(parts, in_axes=(None, 0, 0, 0, 0), spmd_axis_name=STAGE)
        made: Arrays = stages(*given)
        return made

    def _stage(
        self, shared: Arrays, blocks: Arrays, fed: Arrays, state: Arrays, slices: Arrays
    ) -> Arrays:
        """What the layers of one stage leave of one part of a microbatch."""
        first = self._layers.scan.constants

        def layer(now: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
            carry = {first + n: array for n, array in now.items()}
            outs = self._round(shared | fed | own | carry)
            return {n: outs.pop(n) for n in now}, outs

        avals: list[Any] = [var.aval for var in self._layers.few.outvars]
        zeros = {n: jnp.zeros(avals[n].shape, avals[n].dtype) for n in self._added}
        length = self._layers.length // self._schedule.stages
        passed, left = jax.lax.scan(
            layer, state | zeros, blocks | slices, length, reverse=self._layers.reverse
        )
        return {**passed, **left}

    def _work(self, given: Sequence[Any], made: Ahead) -> _Work:
        layers, schedule = self._layers, self._schedule
        needed, (constants, _, _) = self._round.needed, layers.scan.parts(given)
        work = _Work({}, {}, {}, {})
        for n, value in enumerate(constants):
            if isinstance(value, Alike):
                work.shared[n] = value.array
            elif layers.given[n] == "same":
                work.shared[n] = value
            elif n in needed:
                work.fed[n] = schedule.fed(value, layers.scan.eqn.invars[n])
        for n in sorted(needed.difference(range(len(constants)))):
            if n in made.over:
                work.blocks[n] = schedule.laid(schedule.by_stages(made.over[n]), parts=False)
            elif isinstance(given[n], Skewed):
                work.slices[n] = given[n].array
            elif n >= len(constants) + layers.scan.carried:
                work.slices[n] = schedule.skewed(given[n], layers.scan.eqn.invars[n]).array
        return work

    def _everywhere(self, entering: Any) -> Any:
        """What stages begin with; of what they make of it nothing is left."""
        shape = (self._schedule.stages, *entering.shape[1:])
        return self._schedule.laid(jnp.broadcast_to(entering[:1], shape))

    def _zeros(self, n: int) -> Any:
        """What is added to: of each layer, or of each stage."""
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        own = aval.shape
        if n in self._gradients:
            own = (self._layers.length // self._schedule.stages, *own[1:])
        shape = (self._schedule.stages, self._schedule.parts, *own)
        return self._schedule.laid(jnp.zeros(shape, wide(aval.dtype)))

    def _out(self, n: int, rows: Any) -> Any:
        """What has come through all stages; a sum, so that only that is sent."""
        schedule = self._schedule
        own = rows[self._leave : self._leave + schedule.micro]
        is_last = (jnp.arange(schedule.stages) == self._leave).reshape(-1, *[1] * (own.ndim - 2))
        whole = jnp.where(is_last, own, jnp.zeros_like(own)).sum(1, dtype=own.dtype)
        return schedule.leaving(whole, self._layers.scan.eqn.outvars[n])

    def _of_layers(self, totals: Any) -> Any:
        """[stages, parts, layers of a stage, ...] as [layers, ...]."""
        summed = self._schedule.laid(totals.sum(1), parts=False)
        return summed.reshape(self._layers.length, *summed.shape[2:])

    def _total(self, n: int, total: Any, before: Any) -> Any:
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        return (before + total).astype(aval.dtype)


def _chosen(flags: Any, those: Any, others: Any) -> Any:
    """For each stage of the first dimension one or the other."""
    return jnp.where(flags.reshape(-1, *[1] * (others.ndim - 1)), those, others)
