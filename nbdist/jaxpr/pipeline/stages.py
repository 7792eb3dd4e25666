"""The stages of a scan over layers, which run at once on different microbatches.

The stages are an array dimension that is sharded over a mesh axis. Values pass to the next stage by
a roll along it, which XLA compiles to a collective permute. Results of stages in ticks without a
microbatch are discarded.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.jaxpr.microbatches import accumulator_dtype
from nbdist.jaxpr.pipeline.precompute import PartialLayer, precompute
from nbdist.jaxpr.pipeline.schedule import Skewed, chosen
from nbdist.jaxpr.pipeline.uneven_stages import real_layers
from nbdist.planner.graph.pipeline_schedule import block_size
from nbdist.records import DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.pipeline.schedule import Schedule, StageItems


class RowInvariant(NamedTuple):
    """A value that is the same for each row.

    Attributes:
        array: with the rows of one part of a microbatch.
    """

    array: Any


class LayerInputs(NamedTuple):
    """Inputs of the layers without those that stages pass on, by the number of the body's input.

    Attributes:
        shared: the same for all layers and ticks.
        blocks: own values of each layer: [stages, layers of all blocks of a stage, ...].
        fed: rows that all layers read: [ticks, stages, parts, ...].
        slices: own rows of each layer, as in `Skewed`.
        results: results of the scan that do not depend on rows, by the number of the output.
    """

    shared: Arrays
    blocks: Arrays
    fed: Arrays
    slices: Arrays
    results: Arrays


class Stages:
    """A scan over layers, in stages.

    Attributes:
        passed: carried values with rows, by the number of the scan's output.
        stacks: stacked results with rows, by the number of the scan's output.
        first: the stage that microbatches enter.
        last: the stage that they leave.

    Args:
        layers: the scan for one part of a microbatch.
        schedule: schedule of the pipeline; in several rounds, the layers divide by its blocks.
    """

    def __init__(self, layers: Layers, schedule: Schedule) -> None:
        self._layers, self._schedule = layers, schedule
        self.passed, self.stacks = layers.carried("rows"), layers.stacked("rows")
        self._added, self._gradients = layers.carried("sum"), layers.stacked("sum")
        wanted = [*self.passed, *self._added, *self._gradients, *self.stacks]
        self._round = PartialLayer(layers.microbatch_body, wanted)
        ends = (0, schedule.stages - 1)
        self.first, self.last = ends[::-1] if layers.reverse else ends
        self._first_round = schedule.rounds - 1 if layers.reverse else 0
        self._block_size = block_size(layers.length, schedule.stages, schedule.rounds)
        self._real: Any = None  # flags of layers, [stages, layers of a block], if stages differ
        if layers.length % schedule.stages:
            self._real = real_layers(layers.length, schedule.stages)

    def prepare(self, given: Sequence[Any], *, is_late: bool = False) -> LayerInputs:
        """Prepare the inputs of the layers.

        Args:
            given: inputs of the scan. Constants with rows may be `RowInvariant`, scanned inputs
                `Skewed` or `Interleaved`; None for values that arrive with the ticks.
            is_late: True if a microbatch is at the last stage first.
        """
        layers, schedule = self._layers, self._schedule
        interleave = partial(schedule.interleaved, is_sharded=True)
        deinterleave = partial(schedule.deinterleaved, layers=layers.length, is_sharded=True)
        places = schedule.stages * schedule.rounds * self._block_size
        precomputed = precompute(layers, dict(enumerate(given)), interleave, deinterleave, places)
        drawn = [schedule.sharded(array, parts=False) for array in precomputed.draws.values()]
        all_ = [*given, *drawn]
        needed, (constants, _, _) = self._round.needed, layers.scan.parts(all_)
        work = LayerInputs({}, {}, {}, {}, precomputed.results)
        for n, value in enumerate(constants):
            if isinstance(value, RowInvariant):
                work.shared[n] = value.array
            elif layers.input_kinds[n] == "same":
                work.shared[n] = value
            elif n in needed:
                work.fed[n] = schedule.feed_by_tick(
                    value, layers.scan.eqn.invars[n], is_late=is_late
                )
        for n in sorted(needed.difference(range(len(constants)))):
            if n in precomputed.inputs:
                work.blocks[n] = schedule.sharded(
                    schedule.by_stages(precomputed.inputs[n]), parts=False
                )
            elif isinstance(all_[n], Skewed):
                work.slices[n] = all_[n].array
            elif n >= len(constants) + layers.scan.carried and all_[n] is not None:
                var = layers.scan.eqn.invars[n]
                rows = all_[n]
                if n < len(given):
                    rows = schedule.interleaved(rows, is_sharded=False)
                work.slices[n] = schedule.skewed(rows, var, is_late=is_late).array
        return work

    def initial_state(self, entering: Arrays) -> Arrays:
        """Return the initial values of all stages, which are discarded.

        Args:
            entering: rows of a microbatch: [stages, parts, ...], or 1 in place of the stages.
        """
        schedule = self._schedule
        return {
            n: schedule.sharded(jnp.broadcast_to(array, (schedule.stages, *array.shape[1:])))
            for n, array in entering.items()
        }

    def with_entering(
        self, state: Arrays, entering: Mapping[int, Any], items: StageItems
    ) -> Arrays:
        """Return the values of stages after a microbatch has entered the first stage and round."""
        is_first = jnp.arange(self._schedule.stages) == self.first
        is_first &= items.round == self._first_round
        return {n: chosen(is_first, array, state[n]) for n, array in entering.items()}

    def run_tick(
        self,
        work: LayerInputs,
        state: Arrays,
        totals: Arrays,
        now: tuple[Arrays, Arrays],
        items: StageItems,
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Run a tick.

        Args:
            work: inputs of the layers for all ticks.
            state: values that stages received.
            totals: sums so far.
            now: inputs of the layers for this tick: `fed` and `slices` of the work.
            items: items of the stages.

        Returns:
            Values to pass on, the new sums, and stacked results of the layers.
        """
        schedule = self._schedule
        fed, slices = now
        own = work.shared, work.blocks, fed, state, slices, items.round
        left = self._stages(*own, self._real)
        totals = {n: self._summed(total, left[n], items, n) for n, total in totals.items()}
        rows = {n: schedule.sharded(left[n]) for n in self.passed}
        return rows, totals, {n: schedule.sharded(left[n]) for n in self.stacks}

    def shifted(self, rows: Arrays) -> Arrays:
        """Pass values on to the next stages."""
        step = -1 if self._layers.reverse else 1
        return {n: self._schedule.sharded(jnp.roll(array, step, 0)) for n, array in rows.items()}

    def result_buffers(self, passed: Arrays) -> Arrays:
        """Return zeros for the results of all microbatches: [microbatches, stages, parts, ...].

        Args:
            passed: rows of a microbatch, in the form of `entering` of `initial_state`.
        """
        schedule = self._schedule
        sizes = schedule.micro, schedule.stages
        return {
            n: schedule.sharded(jnp.zeros((*sizes, *array.shape[1:]), array.dtype), 1)
            for n, array in passed.items()
        }

    def store_results(self, before: Arrays, rows: Arrays, micro: Any) -> Arrays:
        """Store the results of a tick; those of the last round at the last stage remain.

        Args:
            before: the results so far, as from `result_buffers`.
            rows: results of all stages.
            micro: the microbatch at the last stage.
        """
        return {
            n: jax.lax.dynamic_update_index_in_dim(array, rows[n], micro, 0)
            for n, array in before.items()
        }

    def zeros(self) -> Arrays:
        """Return zeros for the sums of each layer, or of each stage."""
        return {n: self._zeros(n) for n in (*self._added, *self._gradients)}

    def sums(self, totals: Arrays, given: Sequence[Any]) -> Arrays:
        """Return the results of the scan that are sums.

        Args:
            totals: the sums after all ticks.
            given: inputs of the scan.
        """
        first = self._layers.scan.constants
        left = {n: self._total(n, totals[n].sum((0, 1)), given[first + n]) for n in self._added}
        return left | {n: self._of_layers(n, totals[n]) for n in self._gradients}

    def _summed(self, total: Any, new: Any, items: StageItems, n: int) -> Any:
        """Add the sums of a tick; gradients of a block are added to its own layers."""
        new = new.astype(total.dtype)
        if n not in self._gradients or self._schedule.rounds == 1:
            return self._schedule.sharded(chosen(items.is_working, total + new, total))

        def own(total: Any, new: Any, round_: Any, is_working: Any) -> Any:
            before = jax.lax.dynamic_slice_in_dim(
                total, round_ * self._block_size, self._block_size, 1
            )
            now = jnp.where(is_working, before + new, before)
            return jax.lax.dynamic_update_slice_in_dim(total, now, round_ * self._block_size, 1)

        run = jax.vmap(own, spmd_axis_name=STAGE)
        return self._schedule.sharded(run(total, new, items.round, items.is_working))

    def _stages(self, *given: Any) -> Arrays:
        """Run all stages and parts; the arguments are those of `_stage` with these dimensions."""
        axis = DATA if self._schedule.parts > 1 else None
        parts = jax.vmap(
            self._stage, in_axes=(None, None, 0, 0, 0, None, None), spmd_axis_name=axis
        )
        stages = jax.vmap(parts, in_axes=(None, 0, 0, 0, 0, 0, 0), spmd_axis_name=STAGE)
        made: Arrays = stages(*given)
        return made

    def _stage(
        self,
        shared: Arrays,
        blocks: Arrays,
        fed: Arrays,
        state: Arrays,
        slices: Arrays,
        round_: Any,
        real: Any,
    ) -> Arrays:
        """Run the layers of one stage on one part of a microbatch, in one round.

        Carried values pass unchanged through a place without a layer of its own; other results of
        such a place are discarded later.
        """
        first = self._layers.scan.constants

        def layer(now: Arrays, given: tuple[Arrays, Any]) -> tuple[Arrays, Arrays]:
            own, is_real = given
            carry = {first + n: array for n, array in now.items()}
            outs = self._round(shared | fed | own | carry)
            made = {n: outs.pop(n) for n in now}
            if is_real is not None:
                made = {n: jnp.where(is_real, array, now[n]) for n, array in made.items()}
            return made, outs

        avals: list[Any] = [var.aval for var in self._layers.microbatch_body.outvars]
        zeros = {n: jnp.zeros(avals[n].shape, avals[n].dtype) for n in self._added}
        if self._schedule.rounds > 1:
            blocks = {
                n: jax.lax.dynamic_slice_in_dim(array, round_ * self._block_size, self._block_size)
                for n, array in blocks.items()
            }
        passed, left = jax.lax.scan(
            layer,
            state | zeros,
            (blocks | slices, real),
            self._block_size,
            reverse=self._layers.reverse,
        )
        return {**passed, **left}

    def _zeros(self, n: int) -> Any:
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        own = aval.shape
        if n in self._gradients:
            own = (self._block_size * self._schedule.rounds, *own[1:])
        shape = (self._schedule.stages, self._schedule.parts, *own)
        return self._schedule.sharded(jnp.zeros(shape, accumulator_dtype(aval.dtype)))

    def _of_layers(self, n: int, totals: Any) -> Any:
        """Return [stages, parts, layers of all blocks of a stage, ...] as [layers, ...]."""
        summed = self._schedule.sharded(totals.sum(1), parts=False)
        whole = self._total(n, summed.reshape(-1, *summed.shape[2:]), 0)
        return self._schedule.deinterleaved(whole, self._layers.length, is_sharded=True)

    def _total(self, n: int, total: Any, before: Any) -> Any:
        aval: Any = self._layers.scan.eqn.outvars[n].aval
        return (before + total).astype(aval.dtype)
