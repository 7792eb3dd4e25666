"""Time of a step in a layout: operations on a roofline, collectives over the links they cross.

If a summed group is sharded, an all-reduce of the result adds the parts (arXiv:1909.08053, section
3). Collectives overlap with operations as in `planner/cost/overlap.py`. Loops over layers in stages
follow `jaxpr/pipeline/stages.py`. In each tick every stage runs its own layers on one microbatch,
and sends the results to the next stage, which waits for them. Outside of them, stages have their
own rows. Values that are sharded along the sequence are gathered once for all operations that need
them whole, and the sums of these are scattered.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from nbdist.planner.cost.interleaving import exchanged_stacks
from nbdist.planner.cost.overlap import Section
from nbdist.planner.cost.roofline import attention_s, issued_s, matmul_s, memory_s
from nbdist.planner.graph.one_f_one_b import PIPELINE_1F1B, parts_of
from nbdist.planner.graph.pipeline_schedule import block_size, bubble
from nbdist.planner.hardware.lookup import computed_as, peak
from nbdist.records import BATCH_AXES, DATA, MODEL, REPLICATE, STAGE, PlannedTime, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.graph.layout import Layout, ShardedModel
    from nbdist.planner.graph.model import Op, Value
    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records import Chip, Extent, Level, Topology


@dataclass(frozen=True)
class Target:
    """Hardware that a plan is made for.

    Attributes:
        topology: devices and links.
        calibration: efficiencies of the devices and links.
        cautious: the figures are too uncertain to choose by time; only memory decides.
    """

    topology: Topology
    calibration: Calibration
    cautious: bool = False


@dataclass
class _CostTotals:
    """Sums of times, operations and bytes of a step."""

    device_s: float = 0.0
    operations: int = 0
    collectives: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    axes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sections: list[Section] = field(default_factory=list)
    gradients: float = 0.0
    idle_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.device_s + sum(self.axes.values())

    def hidden(self, chip: Chip) -> dict[str, float]:
        """Return the seconds of collectives that overlap with operations, by mesh axis."""
        found = defaultdict[str, float](float)
        for section in self.sections:
            of_data, of_model = section.hidden_s(chip)
            found[DATA] += of_data
            found[MODEL] += of_model
        over = {axis: self.axes[axis] for axis in BATCH_AXES if self.axes.get(axis)}
        hidden, whole = found.pop(DATA, 0.0), sum(over.values())
        found.update((axis, hidden * seconds / whole) for axis, seconds in over.items())
        return found


def time_of(
    sharded: ShardedModel,
    program: tuple[Op, ...],
    target: Target,
    extents: dict[str, Extent],
    useful: tuple[Op, ...],
) -> PlannedTime:
    """Return the time of one step.

    Args:
        sharded: the model in its layout.
        program: its operations, fused.
        target: the hardware.
        extents: extent of each mesh axis in the topology.
        useful: operations without recomputed ones, for the model's utilization.
    """
    cost = Cost(sharded, target, extents)
    totals = cost.totals(program)
    topology = target.topology
    compute = issued_s(totals.device_s, totals.operations, totals.collectives, target.calibration)
    hidden = totals.hidden(topology.chip)
    exposed = sum(totals.axes.values()) - sum(hidden.values())
    step = compute + exposed
    return PlannedTime(
        compute=compute,
        exposed=exposed,
        traffic=tuple(
            Traffic(
                axis=axis,
                level=slowest(topology, extents[axis]).name,
                bytes=totals.bytes[axis],
                seconds=seconds,
                hidden=hidden[axis],
            )
            for axis, seconds in totals.axes.items()
            if seconds
        ),
        mfu=_least_s(useful, topology) / step if step else 0.0,
        bubble=totals.idle_s / step if step else 0.0,
        flops=_flops(useful) / topology.devices,
    )


class _Prices(NamedTuple):
    """Prices of a program's operations, by class.

    Attributes:
        numbers: the class of each operation.
        seconds: seconds on each device.
        reduced: bytes of all-reduces, by mesh axis.
        gathered: inputs that are gathered along the sequence, and their bytes.
        is_exchanged: True if rows of a sharded table are sent.
        is_gradient: True for products that sum over the batch: gradients of parameters.
    """

    numbers: list[int]
    seconds: list[float]
    reduced: list[dict[str, float]]
    gathered: list[list[tuple[int, float]]]
    is_exchanged: list[bool]
    is_gradient: list[bool]


class Cost:
    """Prices of operations and of their collectives, in seconds.

    Attributes:
        sharded: the model in its layout.
    """

    def __init__(self, sharded: ShardedModel, target: Target, extents: dict[str, Extent]) -> None:
        self.sharded = sharded
        self._target = target
        self._extents = extents

    def totals(self, program: tuple[Op, ...]) -> _CostTotals:
        """Return the sums of a whole program."""
        totals = _CostTotals()
        self._add(totals, program, 1, Section(), together=1)
        self._add_exchanges(totals, program)
        self._add_data(totals)
        if self.sharded.is_alone:  # each stage has the batch of its part
            batch = (t.value for t in self.sharded.model.tensors if t.role == "batch")
            self._add_collective(
                totals, STAGE, sum(map(self.sharded.bytes_of, batch)), 1, is_half=True
            )
        return totals

    def op_s(self, op: Op) -> float:
        """Return the seconds of an operation other than a loop, on each device."""
        chip, calibration = self._target.topology.chip, self._target.calibration
        if op.kind in ("dot", "conv"):
            dtype = computed_as(chip, _dtype(op, chip))
            batch, m, n, k = _product(op, self.sharded.around(op))
            return matmul_s(batch, m, n, k, dtype, chip, calibration)
        if op.kind == "attention":
            around = self.sharded.around(op)
            flops = op.flops / max(map(around.parts, op.outs))
            return attention_s(flops, _moved(op, around), _dtype(op, chip), chip, calibration)
        return memory_s(_moved(op, self.sharded.around(op)), chip, calibration)

    def reduced(self, op: Op) -> dict[str, float]:
        """Return the bytes of the all-reduces of an operation, by mesh axis."""
        sharded, summed = self.sharded.around(op), set(op.summed)
        found: dict[str, float] = {}
        out = {group for value in op.outs for group in value.groups}
        sized = sharded.summed_bytes if sharded.is_microbatch else sharded.bytes_of
        is_summed = sharded.by_data(summed) > 1 and sharded.by_data(out) == 1
        is_shared = sharded.layout.data > 1 and not sharded.is_apart
        if is_shared and is_summed and sharded.exchanged(op) is None:
            found[DATA] = sum(map(sized, op.outs))
        if sharded.is_added_over_stages(summed, out):
            found[STAGE] = sum(map(sized, op.outs))
        if sharded.by_model(summed) > 1 and sharded.by_model(out) == 1:
            found[MODEL] = sum(map(sharded.bytes_of, op.outs))
        return found

    def all_reduce_s(self, axis: str, nbytes: float) -> float:
        target = self._target
        return all_reduce_s(nbytes, self._extents[axis], target.topology, target.calibration)

    def _half_s(self, axis: str, nbytes: float) -> float:
        """Return the seconds of half an all-reduce: a reduce-scatter or an all-gather."""
        target = self._target
        return reduce_scatter_s(nbytes, self._extents[axis], target.topology, target.calibration)

    def _sums(self, ops: tuple[Op, ...], prices: _Prices) -> Iterator[tuple[Op, str, float]]:
        """Yield the all-reduces of a program; of results that are added before, the first one."""
        done: set[tuple[str, int]] = set()
        for op, number in zip(ops, prices.numbers, strict=True):
            for axis, nbytes in prices.reduced[number].items():
                first = op.outs[0].number
                whole = axis, self.sharded.model.added.get(first, first)
                if whole not in done:
                    done.add(whole)
                    yield op, axis, nbytes

    def _gathers(self, ops: tuple[Op, ...], prices: _Prices) -> list[float]:
        """Return the bytes of values that a program gathers along the sequence, each once."""
        found: dict[int, float] = {}
        for op, number in zip(ops, prices.numbers, strict=True):
            for place, nbytes in prices.gathered[number]:
                found[op.ins[place].number] = nbytes
        return list(found.values())

    def _gathered(self, op: Op) -> list[tuple[int, float]]:
        """Return the inputs that an operation gathers along the sequence, and their bytes."""
        sharded, around = self.sharded, self.sharded.around(op)
        if around is sharded:
            return []
        ins = enumerate(op.ins)
        return [(n, around.bytes_of(v)) for n, v in ins if sharded.is_sequence_sharded(v)]

    def prices(self, ops: tuple[Op, ...]) -> _Prices:
        """Return the prices of a program's operations; those of loops are empty."""
        numbers, firsts = self.sharded.classes(ops)
        return _Prices(
            numbers,
            [0.0 if op.kind == "loop" else self.op_s(op) for op in firsts],
            [{} if op.kind == "loop" else self.reduced(op) for op in firsts],
            list(map(self._gathered, firsts)),
            [self.sharded.exchanged(op) is not None for op in firsts],
            [
                op.kind in ("dot", "conv")
                and not self.sharded.model.batch_groups.isdisjoint(op.summed)
                for op in firsts
            ],
        )

    def inside(self, op: Op) -> tuple[Cost, int]:
        """Return the prices for a loop's body, and how often each device runs it."""
        sharded, layout = self.sharded, self.sharded.layout
        if not sharded.is_staged(op):
            return self, op.times
        few = Cost(sharded.microbatch, self._target, self._extents)
        return few, layout.ticks * block_size(op.times, layout.stage, layout.rounds)

    def _add(
        self,
        totals: _CostTotals,
        ops: tuple[Op, ...],
        times: int,
        section: Section,
        *,
        together: int,
    ) -> None:
        """Add operations.

        Args:
            totals: the sums so far.
            ops: the operations.
            times: number of times that they run.
            section: an empty section for them.
            together: number of their sums over the batch that share one transfer at the end; 0 if
                each is sent by itself.
        """
        prices = self.prices(ops)
        totals.sections.append(section)
        for op, number in zip(ops, prices.numbers, strict=True):
            if op.kind == "loop":
                self._add_loop(totals, op, times, together)
                continue
            seconds = times * prices.seconds[number]
            totals.device_s += seconds
            totals.operations += times
            section.work_s += seconds
            section.gradients_s += seconds * prices.is_gradient[number]
            if prices.is_exchanged[number]:
                self._add_exchange(totals, op, times)
        for op, axis, nbytes in self._sums(ops, prices):
            if axis == DATA:
                self._add_sum(totals, nbytes, times, section, together)
                continue
            if (
                axis == STAGE and self.sharded.is_microbatch
            ):  # kept separate until the last microbatch
                self._add_collective(totals, axis, nbytes, 1, is_half=False)
                continue
            is_scattered = axis == MODEL and any(map(self.sharded.is_sequence_sharded, op.outs))
            spent_s = self._add_collective(totals, axis, nbytes, times, is_half=is_scattered)
            section.activations_s += spent_s * (axis == MODEL)
        for nbytes in self._gathers(ops, prices):
            section.activations_s += self._add_collective(
                totals, MODEL, nbytes, times, is_half=True
            )

    def _add_sum(
        self, totals: _CostTotals, nbytes: float, times: int, section: Section, together: int
    ) -> None:
        """Add a sum over the data axis. See `_add` for `together`."""
        layout, is_step = self.sharded.layout, section is totals.sections[0]
        result = nbytes / (layout.shards if layout.zero else 1)  # ZeRO scatters it
        if together:
            totals.gradients += together * nbytes  # a few large messages at the end
            if is_step:
                section.sums.add(0.0, result)
            return
        is_half = layout.zero == 3 and self._scatters_sums
        spent_s = self._add_collective(totals, DATA, nbytes, times, is_half=is_half)
        spent_s += self._add_replicated(totals, nbytes, times)
        section.sums.add(spent_s * _scattered(layout), result)

    def _add_exchange(self, totals: _CostTotals, op: Op, times: int) -> None:
        """Add the exchange of rows looked up in a sharded table, without the small indices."""
        sent, extent, target = self.sharded.exchanged(op), self._extents[DATA], self._target
        if sent is None:
            return
        send = all_to_all_s
        if sent.is_by_rows:
            send = reduce_scatter_s if op.kind == "lookup" else all_gather_s
        one_s = send(sent.nbytes, extent, target.topology, target.calibration)
        totals.axes[DATA] += times * one_s
        totals.bytes[DATA] += times * sent.nbytes
        totals.collectives[prod(extent)] += times
        if op.kind == "scatter":
            self._add_replicated(totals, self.sharded.bytes_of(op.outs[0]), times)

    @property
    def _scatters_sums(self) -> bool:
        """True if XLA reduce-scatters a gradient that each device needs a part of.

        XLA for CPUs all-reduces it. XLA for TPUs does so within a slice if other slices have
        copies. Seen in compiled programs (docs/planner_internals.md, "Hybrid sharding").
        """
        platform = self._target.topology.chip.platform
        return platform == "gpu" or (platform == "tpu" and self.sharded.layout.replicate == 1)

    def _add_replicated(self, totals: _CostTotals, nbytes: float, times: int) -> float:
        """Add all-reduces of each device's share of arrays over `replicate`; return their seconds.

        Args:
            totals: the sums so far.
            nbytes: bytes of the whole arrays.
            times: number of all-reduces.
        """
        layout = self.sharded.layout
        if layout.replicate == 1:
            return 0.0
        share = nbytes / layout.shards
        return self._add_collective(totals, REPLICATE, share, times, is_half=False)

    def _add_collective(
        self, totals: _CostTotals, axis: str, nbytes: float, times: int, *, is_half: bool
    ) -> float:
        """Add all-reduces, or halves of them, and return their seconds."""
        one_s = self._half_s(axis, nbytes) if is_half else self.all_reduce_s(axis, nbytes)
        totals.axes[axis] += times * one_s
        totals.bytes[axis] += times * nbytes / (2 if is_half else 1)
        totals.collectives[prod(self._extents[axis])] += times
        return times * one_s

    def _add_loop(self, totals: _CostTotals, op: Op, times: int, together: int) -> None:
        if op.name == PIPELINE_1F1B:
            forward, loss_ops, backward = parts_of(op)
            self._add_loop(totals, forward, times, together)
            section = Cost(self.sharded.loss_section, self._target, self._extents)
            before = totals.device_s
            section._add(totals, loss_ops, self.sharded.layout.micro, Section(), together=1)
            idle = 1 - section.sharded.shares / self.sharded.layout.stage
            totals.idle_s += idle * (totals.device_s - before)
            self._add_loop(totals, backward, times, together)
            return
        if self._is_over_microbatches(op):
            totals.gradients += sum(map(self.sharded.bytes_of, op.carried))
            apart = Cost(self.sharded.apart, self._target, self._extents)
            apart._add(totals, op.body, times * op.times, Section(), together=0)
            return
        own = Section(frozenset(value.number for value in op.over), op.times)
        within, rounds = self.inside(op)
        if within is self:
            kept = together if self.sharded.is_microbatch else 0
            self._add(totals, op.body, times * rounds, own, together=kept)
            return
        layout, before = self.sharded.layout, totals.seconds
        within._add(totals, op.body, rounds, own, together=block_size(op.times, layout.stage))
        waits = bubble(layout.stage, layout.micro, layout.rounds)
        totals.idle_s += (totals.seconds - before) * waits / (1 + waits)
        self._add_sends(totals, op, within.sharded)

    def _is_over_microbatches(self, op: Op) -> bool:
        """Return True if a loop adds sums over microbatches that stay on their device."""
        sharded = self.sharded
        return sharded.sums_once and not sharded.is_apart and op.times == sharded.layout.micro

    def _add_sends(self, totals: _CostTotals, op: Op, few: ShardedModel) -> None:
        """Add the transfers between stages in each tick, and those of all rows at the ends."""
        sharded, layout = self.sharded, self.sharded.layout
        rows = [value for value in op.carried if few.has_rows(value)]
        passed = sum(map(few.bytes_of, rows))
        self._add_send(totals, passed, few.layout.ticks)
        sums = sum(sharded.bytes_of(value) for value in op.carried if not few.has_rows(value))
        if sharded.is_alone:  # rows stay at the first stage and at the last stage
            self._add_collective(totals, STAGE, sums, 1, is_half=False)
            return
        # All rows are gathered to all stages, and results are scattered: each half an all-reduce.
        whole = sums + sum(map(sharded.entering_bytes, rows))
        is_whole = not layout.is_divided
        self._add_collective(totals, STAGE, whole, 1, is_half=not is_whole)
        if not is_whole and sharded.loss_section.shares > 1:  # each microbatch at the loss section
            self._add_collective(totals, STAGE, passed, layout.micro, is_half=True)

    def _add_exchanges(self, totals: _CostTotals, program: tuple[Op, ...]) -> None:
        """Add the transfers of layers to their stages, and of gradients back."""
        sharded, rounds = self.sharded, self.sharded.layout.rounds
        for value in exchanged_stacks(sharded, program).values():
            nbytes = sharded.bytes_of(value)
            if sharded.is_uneven(value):
                extent, target = self._extents[STAGE], self._target
                totals.axes[STAGE] += all_to_all_s(
                    nbytes, extent, target.topology, target.calibration
                )
                totals.bytes[STAGE] += nbytes
                totals.collectives[prod(extent)] += 1
            else:
                self._add_send(totals, nbytes / rounds, rounds)

    def _add_send(self, totals: _CostTotals, nbytes: float, times: int) -> None:
        """Add transfers from each stage to another one."""
        target, extent = self._target, self._extents[STAGE]
        outermost = max(place for place, size in enumerate(extent) if size > 1)
        totals.axes[STAGE] += times * send_s(nbytes, outermost, target.topology, target.calibration)
        totals.bytes[STAGE] += times * nbytes
        totals.collectives[2] += times

    def _add_data(self, totals: _CostTotals) -> None:
        """Add the sums of gradients; under ZeRO-3 each microbatch gathers parameters twice."""
        sharded, extent = self.sharded, self._extents[DATA]
        topology, calibration = self._target.topology, self._target.calibration
        if sharded.layout.data == 1:
            return
        step = totals.sections[0]
        is_half = sharded.layout.zero == 3 and (
            sharded.layout.replicate == 1 or self._scatters_sums
        )
        add_s = reduce_scatter_s if is_half else all_reduce_s
        sum_s = add_s(totals.gradients, extent, topology, calibration)
        totals.axes[DATA] += sum_s
        totals.bytes[DATA] += totals.gradients / (2 if is_half else 1)
        if totals.gradients:
            sum_s += self._add_replicated(totals, totals.gradients, 1)
            whole = step.sums.nbytes * (sharded.layout.shards if sharded.layout.zero else 1)
            step.sums.seconds += sum_s * whole / totals.gradients * _scattered(sharded.layout)
        if sharded.layout.zero != 3:
            return
        micro = sharded.layout.micro
        for tensor in filter(sharded.is_gathered, sharded.model.tensors):
            whole = sharded.bytes_of(tensor.value)
            spent_s = 2 * micro * all_gather_s(whole, extent, topology, calibration)
            totals.axes[DATA] += spent_s
            totals.bytes[DATA] += micro * whole
            totals.collectives[prod(extent)] += 2 * micro
            number = tensor.value.number
            readers = [s for s in totals.sections if number in s.reads] or [step]
            for reader in readers:
                reader.gathers.add(spent_s / len(readers), whole / reader.times)


def _scattered(layout: Layout) -> float:
    """Return the share of a gradient's collectives that precede the optimizer.

    Under ZeRO-1, the other half gathers the new parameters.
    """
    return 0.5 if layout.zero == 1 else 1.0


def slowest(topology: Topology, extent: Extent) -> Level:
    """Return the slowest level that an axis crosses; the innermost if it crosses none."""
    crossed = [level for level, size in zip(topology.levels, extent, strict=True) if size > 1]
    return min(crossed or topology.levels[:1], key=lambda level: level.bytes_per_s)


def _least_s(ops: tuple[Op, ...], topology: Topology) -> float:
    """Return the seconds of products and convolutions at the peak of all devices."""
    chip, seconds = topology.chip, 0.0
    for op in ops:
        inner = _least_s(op.body, topology)
        own = op.flops / peak(chip, _dtype(op, chip)) / topology.devices if op.flops else 0.0
        seconds += op.times * (own + inner)
    return seconds


def _flops(ops: tuple[Op, ...]) -> float:
    """Return the operations of products and convolutions on all devices."""
    return sum(op.times * (op.flops + _flops(op.body)) for op in ops)


def _product(op: Op, sharded: ShardedModel) -> tuple[int, int, int, int]:
    """Return batch, m, n and k of a product on each device."""
    left, right, out = (value.size / sharded.parts(value) for value in (*op.ins, *op.outs))
    summed = set(op.summed)
    k = max(1.0, op.contract / (sharded.by_data(summed) * sharded.by_model(summed)))
    batch = 1.0 if op.kind == "conv" else max(1.0, left / k * (right / k) / out)
    n = right / k / batch
    return _whole(batch), _whole(out / n / batch), _whole(n), _whole(k)


def _moved(op: Op, sharded: ShardedModel) -> float:
    """Return the bytes that an operation reads and writes on each device."""
    outs = sum(sharded.bytes_in(op, value) for value in op.outs)
    if op.kind == "lookup":
        return 2 * outs
    ins: list[Value] = list(op.ins)
    if op.kind == "scatter":
        ins = ins[1:]  # the table is updated in place
    return outs + sum(sharded.bytes_in(op, value) for value in ins)


def _dtype(op: Op, chip: Chip) -> str:
    """Return the type of a product's operands; float32 if the chip has no units for it."""
    dtype = next((value.dtype for value in op.ins if "float" in value.dtype), "float32")
    return dtype if dtype != "float64" or dtype in chip.flops else "float32"


def _whole(number: float) -> int:
    return max(1, round(number))
