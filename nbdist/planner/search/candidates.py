"""Candidates: layouts with their memory and time, and the order of preference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.planner.cost.memory import memory_of
from nbdist.planner.cost.time import time_of
from nbdist.planner.hardware.topology import extents
from nbdist.planner.search.mesh_sizes import slow_links
from nbdist.planner.search.step_variants import REMATS
from nbdist.records import BATCH_AXES, MODEL, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.planner.cost.time import Target
    from nbdist.planner.graph.layout import ShardedModel
    from nbdist.planner.graph.model import Op, Tensor
    from nbdist.planner.search.step_variants import Steps
    from nbdist.records import Extent, PlannedMemory, PlannedTime, Topology


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and time.

    Attributes:
        crossed_links: links between hosts that its tensor parallelism crosses; empty if none.
        replicated_table: path of a large table that every device has whole; None if there is none.
    """

    sharded: ShardedModel
    memory: PlannedMemory
    time: PlannedTime
    crossed_links: str
    replicated_table: str | None

    @property
    def fits(self) -> bool:
        return self.memory.free >= 0

    @property
    def is_pipeline(self) -> bool:
        return self.sharded.layout.stage > 1

    @property
    def title(self) -> str:
        return title_of(self.sharded.layout)

    @property
    def exceeds_by_activations(self) -> bool:
        """True if it would fit with fewer activations."""
        return not self.fits and self.memory.total - self.memory.activations < self.memory.available

    @property
    def half_overlapped_s(self) -> float:
        """Seconds of a step if half of the data axis's exposed collectives overlap too."""
        data_s = sum(t.seconds - t.hidden for t in self.time.traffic if t.axis in BATCH_AXES)
        least = max(self.time.step - data_s, data_s)
        return (self.time.step + least) / 2

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: no tensor parallelism across hosts, then time, then the fewest changes."""
        step = float(f"{self.time.step:.3g}")
        return bool(self.crossed_links), step, *self.changes

    @property
    def changes(self) -> tuple[int, ...]:
        """Sort key of the changes to a step on one device."""
        layout = self.sharded.layout
        remat = REMATS.index(layout.remat)
        order = layout.schedule != "gpipe", layout.rounds, layout.loss_stages != "all"
        sizes = layout.stage, layout.model, layout.sequence
        return *sizes, remat, *order, layout.micro, layout.zero, layout.replicate


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, best first.

    Schedules that hide more of the gradients over the data axis than expected make a step without
    stages faster, but not the bubble. Half of that gain is assumed, and a pipeline that is slower
    than that comes after all others.
    """
    found = sorted(candidates, key=lambda c: c.rank)
    flat = [c for c in found if c.fits and not c.crossed_links and not c.is_pipeline]
    if not flat:
        return found
    best_s = flat[0].half_overlapped_s

    def key(one: Candidate) -> tuple[object, ...]:
        return one.rank[0], one.is_pipeline and one.time.step > best_s, *one.rank[1:]

    return sorted(found, key=key)


def priced(sharded: ShardedModel, steps: Steps, target: Target, budget: int) -> Candidate:
    """Return the candidate of a layout, with a budget of bytes on each device."""
    step = steps.of(sharded.layout)
    is_tpu = target.topology.chip.platform == "tpu"
    program = step.program
    if sharded.layout.is_divided:
        program = step.program_1f1b
    elif sharded.layout.stage == 1 and is_tpu:
        program = step.on_tpus
    extent = extents(sharded.layout.axes, target.topology)
    return Candidate(
        sharded,
        memory_of(sharded.on_tpus if is_tpu else sharded, program, budget),
        time_of(sharded, program, target, extent, steps.useful),
        _crossed_links(sharded, step.program, target.topology, extent[MODEL]),
        _replicated_table(sharded, step.large),
    )


def _crossed_links(
    sharded: ShardedModel, program: tuple[Op, ...], topology: Topology, extent: Extent
) -> str:
    """Return links between hosts over which parts of products are summed, without look-ups.

    Sums that each layer waits for belong on links within hosts (arXiv:2104.04473, section 3).
    """
    crossed = slow_links(topology, extent)
    return crossed[-1] if crossed and sharded.shards_products(program) else ""


def _replicated_table(sharded: ShardedModel, large: list[Tensor]) -> str | None:
    """Return the path of the first large table that every device has whole."""
    whole = (t.path for t in large if sharded.device_bytes(t) == t.value.nbytes)
    return next(whole, None)
