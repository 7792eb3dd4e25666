"""A scan over layers as a pipeline in which one pass ends before the next one starts.

All microbatches end the forward pass before one starts backward (GPipe: arXiv:1811.06965). The
backward pass runs the same ticks in reverse order, so that each tick finds the results of its
forward pass.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.jaxpr.pipeline.schedule import Skewed, StageRows
from nbdist.jaxpr.pipeline.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.jaxpr.pipeline.layer_scans import Layers
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.pipeline.schedule import Schedule
    from nbdist.jaxpr.pipeline.stages import LayerInputs


class Pipeline:
    """A scan over layers, run in stages.

    Args:
        layers: the scan for one part of a microbatch.
        schedule: schedule of the pipeline; in several rounds, the layers divide by its blocks.
    """

    def __init__(self, layers: Layers, schedule: Schedule) -> None:
        self._layers, self._schedule = layers, schedule
        self._stages = Stages(layers, schedule)

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Run the scan.

        Args:
            given: its inputs. Constants with rows may be `RowInvariant`, carried rows `StageRows`,
                and scanned inputs `Skewed` or `Interleaved`.

        Returns:
            The results of the scan; carried rows are `StageRows`, stacks of rows `Skewed`, other
            stacks `Interleaved`, sums plain.
        """
        layers, schedule, stages = self._layers, self._schedule, self._stages
        first, outs = layers.scan.constants, layers.scan.eqn.outvars
        work = stages.prepare(given)
        entering = {n: self._entering(given[first + n], outs[n]) for n in stages.passed}
        state = stages.initial_state({n: array[0] for n, array in entering.items()})
        rows = stages.result_buffers({n: array[0] for n, array in entering.items()})
        (_, totals, rows), stacks = jax.lax.scan(
            partial(self._tick, work, entering),
            (state, stages.zeros(), rows),
            (jnp.arange(schedule.ticks), work.fed, work.slices),
            reverse=layers.reverse,
        )
        left = work.results | stages.sums(totals, given)
        left |= {n: Skewed(array) for n, array in stacks.items()}
        left |= {n: StageRows(array, stages.last) for n, array in rows.items()}
        return [left[n] for n in range(len(left))]

    def _entering(self, rows: Any, var: Any) -> Any:
        """Return rows as [microbatches, stages, parts, ...], or 1 in place of the stages."""
        if isinstance(rows, StageRows):
            if rows.stage == self._stages.first:
                return rows.array
            rows = self._schedule.leaving(rows, var)
        return jnp.expand_dims(self._schedule.entering(rows, var), 1)

    def _tick(
        self, work: LayerInputs, entering: Arrays, carry: tuple[Arrays, Arrays, Arrays], at: Any
    ) -> tuple[Any, Any]:
        (state, totals, left), (tick, *now) = carry, at
        schedule, stages = self._schedule, self._stages
        items, next_, out = (
            schedule.items_of_tick(tick, stage=s) for s in (None, stages.first, stages.last)
        )
        coming = {
            n: jax.lax.dynamic_index_in_dim(a, next_.micro, keepdims=False)
            for n, a in entering.items()
        }
        state = stages.with_entering(state, coming, items)
        rows, totals, stacks = stages.run_tick(work, state, totals, tuple(now), items)
        return (stages.shifted(rows), totals, stages.store_results(left, rows, out.micro)), stacks
