"""The stages of a scan over layers: all of them at once, each on a microbatch of its own.

The stages are a dimension, cut over an axis of the mesh; what they pass on is rolled along it,
which XLA does with a collective permute. What stages make in ticks in which they have no microbatch
goes nowhere.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.jaxpr.microbatches import wide
from nbdist.jaxpr.pipeline.precompute import Round, ahead
from nbdist.jaxpr.pipeline.schedule import Skewed
from nbdist.records import DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.pipeline.schedule import Schedule, Ticks


class Alike(NamedTuple):
    """What is the same for each row.

    Attributes:
        array: with the rows of a part of a microbatch.
    """

    array: Any


class Work(NamedTuple):
    """What the layers are given but for what stages pass on, by the numbers of the body's inputs.

    Attributes:
        shared: by all, in all ticks.
        blocks: each layer's own: [stages, layers of all blocks of a stage, ...].
        fed: rows that all layers are given: [ticks, stages, parts, ...].
        slices: each layer's own rows, as `Skewed` has them.
        left: what the scan leaves that has nothing of rows, by the numbers of its outputs.
    """

    shared: Arrays
    blocks: Arrays
    fed: Arrays
    slices: Arrays
    left: Arrays


class Stages:
    """A scan over layers, in stages.

    Attributes:
        passed: what goes from layer to layer and has rows, by the numbers of the scan's outputs.
        stacks: what each layer leaves of them, likewise.
        first: the stage at which microbatches come in.
        last: the stage at which they leave.

    Args:
        layers: the scan, with the rows of a part of a microbatch.
        schedule: of the ticks; the layers divide by its stages and rounds.
    """

    def __init__(self, layers: Layers, schedule: Schedule) -> None:
        self._layers, self._schedule = layers, schedule
        self.passed, self.stacks = layers.carried("rows"), layers.stacked("rows")
        self._added, self._gradients = layers.carried("sum"), layers.stacked("sum")
        wanted = [*self.passed, *self._added, *self._gradients, *self.stacks]
        self._round = Round(layers.few, wanted)
        ends = (0, schedule.stages - 1)
        self.first, self.last = ends[::-1] if layers.reverse else ends
        self._begins = schedule.rounds - 1 if layers.reverse else 0
        self._per = layers.length // (schedule.stages * schedule.rounds)

    def work(self, given: Sequence[Any], *, is_late: bool = False) -> Work:
        """What is made before the rows come.

        Args:
            given: what the scan is given. Constants that have rows may be `Alike`, and what it goes
                over `Skewed` or `Dealt`; None is what comes with the ticks.
            is_late: whether a microbatch is at the last stage first.
        """
        layers, schedule = self._layers, self._schedule
        deal = partial(schedule.dealt, is_cut=True)
        collect = partial(schedule.collected, is_cut=True)
        made = ahead(layers, dict(enumerate(given)), deal, collect)
        drawn = [schedule.sharded(array, parts=False) for array in made.drawn.values()]
        all_ = [*given, *drawn]
        needed, (constants, _, _) = self._round.needed, layers.scan.parts(all_)
        work = Work({}, {}, {}, {}, made.left)
        for n, value in enumerate(constants):
            if isinstance(value, Alike):
                work.shared[n] = value.array
            elif layers.given[n] == "same":
                work.shared[n] = value
            elif n in needed:
                work.fed[n] = schedule.fed(value, layers.scan.eqn.invars[n], is_late=is_late)
        for n in sorted(needed.difference(range(len(constants)))):
            if n in made.over:
                work.blocks[n] = schedule.sharded(schedule.by_stages(made.over[n]), parts=False)
            elif isinstance(all_[n], Skewed):
                work.slices[n] = all_[n].array
            elif n >= len(constants) + layers.scan.carried and all_[n] is not None:
                var = layers.scan.eqn.invars[n]
                rows = all_[n] if n >= len(given) else schedule.dealt(all_[n], is_cut=False)
                work.slices[n] = schedule.skewed(rows, var, is_late=is_late).array
        return work

    def begun(self, entering: Arrays) -> Arrays:
        """What stages begin with, like such rows; of what they make of it nothing is left."""
        return {n: self._everywhere(array) for n, array in entering.items()}

    def entered(self, state: Arrays, entering: Mapping[int, Any], seats: Ticks) -> Arrays:
        """What stages have once a microbatch is at the first of them, and in its first round."""
        is_first = jnp.arange(self._schedule.stages) == self.first
        is_first &= seats.round == self._begins
        return {n: _chosen(is_first, array, state[n]) for n, array in entering.items()}

    def advanced(
        self, work: Work, state: Arrays, totals: Arrays, now: tuple[Arrays, Arrays], seats: Ticks
    ) -> tuple[Arrays, Arrays, Arrays]:
        """A tick.

        Args:
            work: what layers are given in all of them.
            state: what stages have of what is passed on.
            totals: what is added to.
            now: what layers are given in this tick: `fed` and `slices` of the work.
            seats: what stages are at.

        Returns:
            What stages pass on, the totals, and what their layers leave.
        """
        schedule = self._schedule
        fed, slices = now
        left = self._stages(work.shared, work.blocks, fed, state, slices, seats.round)
        totals = {n: self._summed(total, left[n], seats, n) for n, total in totals.items()}
        rows = {n: schedule.sharded(left[n]) for n in self.passed}
        return rows, totals, {n: schedule.sharded(left[n]) for n in self.stacks}

    def moved(self, rows: Arrays) -> Arrays:
        """What stages have of what was passed on."""
        step = -1 if self._layers.reverse else 1
        return {n: self._schedule.sharded(jnp.roll(array, step, 0)) for n, array in rows.items()}

    def leaves(self, passed: Arrays) -> Arrays:
        """Where `left` puts what leaves, of such rows: [microbatches, stages, parts, ...]."""
        schedule = self._schedule
        sizes = schedule.micro, schedule.stages
        return {
            n: schedule.sharded(jnp.zeros((*sizes, *array.shape), array.dtype), 1)
            for n, array in passed.items()
        }

    def left(self, before: Arrays, rows: Arrays, micro: Any) -> Arrays:
        """With what stages make in a tick; of the last one, what comes out of its last round stays.

        Args:
            before: as `leaves` has made it.
            rows: what stages make.
            micro: the microbatch that the last one is at.
        """
        return {
            n: jax.lax.dynamic_update_index_in_dim(array, rows[n], micro, 0)
            for n, array in before.items()
        }

    def leaving(self, rows: Any) -> Any:
        """Of [..., stages, parts, ...], as it is in each tick, that of the last stage.

        A sum, so that only that is sent.
        """
        is_last = (jnp.arange(self._schedule.stages) == self.last).reshape(
            -1, *[1] * (rows.ndim - 2)
        )
        return jnp.where(is_last, rows, jnp.zeros_like(rows)).sum(1, dtype=rows.dtype)

    def zeros(self) -> Arrays:
        """What is added to: of each layer, or of each stage."""
        return {n: self._zeros(n) for n in (*self._added, *self._gradients)}

    def sums(self, totals: Arrays, given: Sequence[Any]) -> Arrays:
        """What the scan leaves of the totals.

        Args:
            totals: when all ticks are over.
            given: what the scan is given.
        """
        first = self._layers.scan.constants
        left = {n: self._total(n, totals[n].sum((0, 1)), given[first + n]) for n in self._added}
        return left | {n: self._of_layers(n, totals[n]) for n in self._gradients}

    def _summed(self, total: Any, new: Any, seats: Ticks, n: int) -> Any:
        """With what was made in a tick; gradients of one block are those of its layers alone."""
        new = new.astype(total.dtype)
        if n not in self._gradients or self._schedule.rounds == 1:
            return self._schedule.sharded(_chosen(seats.is_working, total + new, total))

        def own(total: Any, new: Any, turn: Any, is_working: Any) -> Any:
            before = jax.lax.dynamic_slice_in_dim(total, turn * self._per, self._per, 1)
            now = jnp.where(is_working, before + new, before)
            return jax.lax.dynamic_update_slice_in_dim(total, now, turn * self._per, 1)

        run = jax.vmap(own, spmd_axis_name=STAGE)
        return self._schedule.sharded(run(total, new, seats.round, seats.is_working))

    def _stages(self, *given: Any) -> Arrays:
        """What the layers leave, [stages, parts, ...], of what `_stage` is given."""
        axis = DATA if self._schedule.parts > 1 else None
        parts = jax.vmap(self._stage, in_axes=(None, None, 0, 0, 0, None), spmd_axis_name=axis)
        stages = jax.vmap(parts, in_axes=(None, 0, 0, 0, 0, 0), spmd_axis_name=STAGE)
        made: Arrays = stages(*given)
        return made

    def _stage(
        self, shared: Arrays, blocks: Arrays, fed: Arrays, state: Arrays, slices: Arrays, turn: Any
    ) -> Arrays:
        """What the layers of one stage leave of one part of a microbatch, in one round."""
        first = self._layers.scan.constants

        def layer(now: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
            carry = {first + n: array for n, array in now.items()}
            outs = self._round(shared | fed | own | carry)
            return {n: outs.pop(n) for n in now}, outs

        avals: list[Any] = [var.aval for var in self._layers.few.outvars]
        zeros = {n: jnp.zeros(avals[n].shape, avals[n].dtype) for n in self._added}
        if self._schedule.rounds > 1:
            blocks = {
                n: jax.lax.dynamic_slice_in_dim(array, turn * self._per, self._per)
                for n, array in blocks.items()
            }
        passed, left = jax.lax.scan(
            layer, state | zeros, blocks | slices, self._per, reverse=self._layers.reverse
        )
        return {**passed, **left}

    def _everywhere(self, array: Any) -> Any:
        return self._schedule.sharded(
            jnp.broadcast_to(array, (self._schedule.stages, *array.shape))
        )

    def _zeros(self, n: int) -> Any:
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        own = aval.shape
        if n in self._gradients:
            own = (self._per * self._schedule.rounds, *own[1:])
        shape = (self._schedule.stages, self._schedule.parts, *own)
        return self._schedule.sharded(jnp.zeros(shape, wide(aval.dtype)))

    def _of_layers(self, n: int, totals: Any) -> Any:
        """[stages, parts, layers of all blocks of a stage, ...] as [layers, ...]."""
        summed = self._schedule.sharded(totals.sum(1), parts=False)
        whole = self._total(n, summed.reshape(self._layers.length, *summed.shape[2:]), 0)
        return self._schedule.collected(whole, is_cut=True)

    def _total(self, n: int, total: Any, before: Any) -> Any:
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        return (before + total).astype(aval.dtype)


def _chosen(flags: Any, those: Any, others: Any) -> Any:
    """For each stage of the first dimension one or the other."""
    return jnp.where(flags.reshape(-1, *[1] * (others.ndim - 1)), those, others)
