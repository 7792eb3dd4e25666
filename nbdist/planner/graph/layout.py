"""Layouts of a step: how each array is sharded over the axes of a mesh.

`data` shards the batch. `model` shards groups of dimensions. If a summed group is sharded, each
device has a part of the sum (tensor parallelism, arXiv:1909.08053). Carried arrays may also be
sharded over `data`, and are gathered for their use (ZeRO, arXiv:1910.02054). `replicate` shards
the batch as `data` does, and nothing else (HSDP, arXiv:2304.11277, section 3.2.2). `stage` splits
the layers of scans into stages, which the batch passes in microbatches (GPipe, arXiv:1811.06965;
1F1B, arXiv:2104.04473). Values between layers may be sharded along the sequence
(`planner/graph/sequence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.graph.layers import is_over_layers
from nbdist.planner.graph.pipeline_schedule import block_size, room, shared_dimension, ticks
from nbdist.planner.graph.program import Program
from nbdist.planner.graph.sequence import sequence_of
from nbdist.planner.graph.tpu_padding import padded
from nbdist.records import DATA, MODEL, REPLICATE, STAGE, sums_once

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from nbdist.planner.graph.model import Model, Op, Tensor, Value
    from nbdist.planner.graph.program import Classes
    from nbdist.records import LossStages, Remat, Schedule, Spec, Zero

SMALLEST = 2**11
"""Elements of the smallest array that is sharded over the data axis; to gather a smaller one costs
a message and saves nothing."""

SUMMED_EACH_TIME = frozenset(
    ("conv_general_dilated", "ffi_call", "pallas_call", "sharding_constraint", "shard_map")
)
"""Primitives with which the sums of each microbatch are added over the data axis.

Otherwise, each place of the axis keeps its own sums in a dimension of places. These primitives do
not accept that dimension, or XLA gathers it: a convolution would become a grouped one."""

_SUM_ITEM = 4
"""Bytes of an element of sums over microbatches; see `accumulator_dtype` of `jaxpr/`."""


@dataclass(frozen=True)
class Layout:
    """A layout of a step.

    Attributes:
        data: devices that share the batch.
        model: devices that share the model.
        split: groups that are sharded over `model`.
        zero: ZeRO stage: the arrays that are sharded over `data` beside the batch.
        remat: activations that are recomputed.
        micro: number of microbatches.
        stage: number of stages that the layers are split into.
        sequence: True if `model` shards results of products along the sequence.
        schedule: order in which microbatches pass the stages.
        rounds: passes of a microbatch through all stages; each stage has as many blocks of layers.
        loss_stages: stages that compute the loss section. With `last`, operations outside of layers
            run where their rows are, and only sums over rows are sent to other stages.
        replicate: groups of devices that each have all arrays; a divisor of `data`.
    """

    data: int
    model: int
    split: frozenset[int] = frozenset()
    zero: Zero = 0
    remat: Remat = ""
    micro: int = 1
    stage: int = 1
    sequence: bool = False
    schedule: Schedule = "gpipe"
    rounds: int = 1
    loss_stages: LossStages = "all"
    replicate: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, outermost first: stages send least."""
        stages = {STAGE: self.stage} if self.stage > 1 else {}
        groups = {REPLICATE: self.replicate} if self.replicate > 1 else {}
        return {**stages, **groups, DATA: self.shards, MODEL: self.model}

    @property
    def shards(self) -> int:
        """Devices over which ZeRO shards: the size of the axis `data`."""
        return self.data // self.replicate

    @property
    def sums_once(self) -> bool:
        """True if sums over microbatches may be added over `data` once a step, at the end."""
        return sums_once(self)

    @property
    def blocks(self) -> int:
        """Blocks of layers of all stages; in each tick a stage runs one."""
        return self.stage * self.rounds

    @property
    def ticks(self) -> int:
        """Ticks of the pipeline in one direction."""
        return ticks(self.stage, self.micro, self.rounds)

    @property
    def held(self) -> float:
        """Microbatches whose results a stage stores; under GPipe with those of idle ticks."""
        is_gpipe = self.schedule == "gpipe"
        ticks = self.ticks if is_gpipe else room(self.stage, self.micro, self.rounds)
        return ticks / self.rounds

    @property
    def is_divided(self) -> bool:
        """True if the loss section of a pipeline runs on one microbatch at a time."""
        return self.stage > 1 and (self.schedule == "1f1b" or self.loss_stages == "last")


class Exchange(NamedTuple):
    """Transfer over the data axis for a sharded table.

    Attributes:
        nbytes: bytes of rows on each device: its own, or those of all.
        is_by_rows: True if the table is sharded by rows; then the rows are those of all devices of
            the axis.
    """

    nbytes: float
    is_by_rows: bool


class ShardedModel:
    """A model in a layout.

    Args:
        model: the step.
        layout: its layout.
        states: numbers of the carried values that are not parameters.
        given: specs by path that override the layout.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        states: frozenset[int],
        given: Mapping[str, Spec] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self._axes = layout.axes
        self._states = states
        self._given = given or {}
        divides = model.rows % layout.data == 0  # otherwise every device computes the whole batch
        self._rows = model.batch_groups
        self._batch = self._rows if divides else frozenset()
        self._parts = layout.data
        if model.rows % (layout.data * layout.stage) == 0 and not self.is_alone:
            self._parts *= layout.stage  # outside of pipelines, each stage has its own rows
        self.is_microbatch = False
        self.is_loss_section = False
        self.is_apart = False
        self.shares = 1
        self._pads = False
        self._known: dict[tuple[int, ...], float] = {}
        self._specs: dict[tuple[tuple[int, ...], tuple[int, ...], str], Spec] = {}

    def with_layout(self, layout: Layout) -> ShardedModel:
        """Return the same model in another layout."""
        same = ShardedModel(self.model, layout, self._states, self._given)
        same._pads = self._pads
        return same

    @cached_property
    def on_tpus(self) -> ShardedModel:
        """The same with the padding of TPU memory; inputs of the step are counted without it."""
        same = self.with_layout(self.layout)
        same._pads = True
        return same

    @cached_property
    def microbatch(self) -> ShardedModel:
        """The same for the rows of one microbatch."""
        few = self.with_layout(self.layout)
        few._parts = self.layout.data * self.layout.micro
        few.is_microbatch = True
        return few

    @cached_property
    def sums_once(self) -> bool:
        """True if sums over microbatches are added over `data` once a step, at the end."""
        divides = self.model.rows % (self.layout.data * self.layout.micro) == 0
        is_possible = self.layout.sums_once and divides
        return is_possible and self.model.primitives.isdisjoint(SUMMED_EACH_TIME)

    @cached_property
    def apart(self) -> ShardedModel:
        """The same within a microbatch, whose sums over rows stay on their device."""
        same = self.with_layout(self.layout)
        same.is_apart = True
        return same

    @cached_property
    def loss_section(self) -> ShardedModel:
        """The same for the loss section, whose rows stages share if they divide."""
        few = self.with_layout(self.layout)
        few._parts, few.is_microbatch = self.microbatch._parts, True
        few.is_loss_section = True
        if self.model.rows % (few._parts * self.layout.stage) == 0 and not self.is_alone:
            few.shares = self.layout.stage
            few._parts *= few.shares
        return few

    @cached_property
    def sequence(self) -> frozenset[int]:
        """Groups along which the model axis shards results of products."""
        layout = self.layout
        if not layout.sequence:
            return frozenset()
        return sequence_of(self.model, layout.split, layout.model)

    @cached_property
    def _gathered(self) -> ShardedModel:
        """The same with whole sequences."""
        same = self.with_layout(replace(self.layout, sequence=False))
        same._parts, same.is_microbatch = self._parts, self.is_microbatch
        same.is_loss_section = self.is_loss_section
        same.shares, same.is_apart = self.shares, self.is_apart
        return same

    def classes(self, ops: tuple[Op, ...]) -> Classes:
        """Return the classes of operations that cost the same in this layout."""
        program = ops if isinstance(ops, Program) else Program(ops)
        layout = self.layout
        zero = layout.zero if layout.shards > 1 else 0
        of_model = self._rows, self.model.layers, self._states
        stages = layout.stage if self.model.stacked else 1
        key = layout.split, self.sequence, zero, stages, *of_model
        return program.classes(key, self._value_key, self._group_key)

    def _value_key(self, value: Value) -> Hashable:
        groups = value.groups
        is_special = groups in self.model.tables or groups in self.model.images
        kinds = groups if is_special else tuple(map(self._group_key, groups))
        stored = groups in self._sharded_states, self._is_stacked(value)
        return value.sizes, value.dtype, value.nbytes, kinds, *stored

    def _group_key(self, group: int) -> int:
        return self._kinds.get(group, 0)

    @cached_property
    def _kinds(self) -> dict[int, int]:
        """Bits for the sets that a group belongs to."""
        found: dict[int, int] = {}
        sets = self._rows, self.layout.split, self.model.layers, self.sequence
        for bit, groups in enumerate(sets):
            found |= {group: found.get(group, 0) | 1 << bit for group in groups}
        return found

    def around(self, op: Op) -> ShardedModel:
        """Return the layout around an operation: with whole sequences if the model axis shares it.

        A loop keeps its layout, because this applies to the operations of its body.
        """
        if not self.sequence or op.body:
            return self
        values = (*op.ins, *op.outs)
        is_shared = any(self.by_model({*value.groups, *op.summed}) > 1 for value in values)
        return self._gathered if is_shared else self

    def is_sequence_sharded(self, value: Value) -> bool:
        """Return True if the model axis shards a value only along the sequence."""
        groups = set(value.groups)
        is_there = self.has_rows(value) and not self.sequence.isdisjoint(groups)
        return is_there and self.by_model(groups) == 1

    def is_staged(self, op: Op) -> bool:
        """Return True if an operation is a loop that runs as a pipeline."""
        return self.layout.stage > 1 and is_over_layers(op, self.model)

    @property
    def is_alone(self) -> bool:
        """True if the last stage of a pipeline computes the loss section alone."""
        return self.layout.stage > 1 and self.layout.loss_stages == "last"

    @property
    def by_stage_too(self) -> bool:
        """True if rows are sharded over the stages as well."""
        return not self.is_microbatch and self._parts > self.layout.data

    def is_added_over_stages(self, summed: set[int], out: set[int]) -> bool:
        """Return True if stages add a sum over these groups, because it is over rows.

        Args:
            summed: groups that are summed over.
            out: groups of the result.
        """
        is_by_row = self.by_stage_too or self.is_loss_section
        is_outside = is_by_row or (self.is_alone and not self.is_microbatch)
        return is_outside and not self._batch.isdisjoint(summed) and self._batch.isdisjoint(out)

    def has_rows(self, value: Value) -> bool:
        """Return True if a value has dimensions of the batch."""
        return not self._rows.isdisjoint(value.groups)

    def by_data(self, groups: set[int]) -> int:
        """Return the parts of the batch for a value with dimensions of these groups."""
        return 1 if self._batch.isdisjoint(groups) else self._parts

    def by_model(self, groups: set[int]) -> int:
        """Return the number of parts of these groups over the model axis."""
        return 1 if self.layout.split.isdisjoint(groups) else self.layout.model

    def by_stage(self, groups: set[int]) -> float:
        """Return the parts of layers over the stage axis, which shards only one dimension.

        If stages do not divide the layers, each has room for as many as the largest stage.
        """
        shards_rows = self.by_stage_too and self.by_data(groups) > 1
        own = self.model.layers & groups
        if shards_rows or not own:
            return 1
        layers = max(self.model.groups[group].divisor for group in own)
        return layers / block_size(layers, self.layout.stage)

    def is_uneven(self, value: Value) -> bool:
        """Return True if a value has layers that stages store by another dimension.

        Stages do not divide them, or the step stacks them from separate arrays.
        """
        own = self.model.layers.intersection(value.groups)
        if own and self.model.stacked:
            return True
        return any(self.model.groups[group].divisor % self.layout.stage for group in own)

    def parts(self, value: Value) -> float:
        """Return the number of parts of a value."""
        if value.groups not in self._known:
            groups = set(value.groups)
            by_model = self.by_model(groups)
            if self.is_sequence_sharded(value):
                by_model = self.layout.model
            parts = self.by_data(groups) * by_model * self.by_stage(groups)
            if self._is_stacked(value) and not self.is_microbatch:
                parts *= self.layout.stage
            self._known[value.groups] = parts
        return self._known[value.groups]

    def _is_stacked(self, value: Value) -> bool:
        """Return True for a layer's array, or its state, of which each stage stores a part."""
        stages, groups, stacked = self.layout.stage, value.groups, self.model.stacked
        is_layer = groups in stacked or (groups[:1] == (-1,) and groups[1:] in stacked)
        return is_layer and stages > 1 and any(size % stages == 0 for size in value.sizes)

    def bytes_of(self, value: Value) -> float:
        """Return the bytes of a value on each device."""
        nbytes = value.nbytes / self.parts(value)
        return nbytes * self._padding(value) if self._pads else nbytes

    def _padding(self, value: Value) -> float:
        """Return the padding factor of a value, for the dimension along lanes that needs least."""
        along = self.model.images.get(value.groups, ())
        sizes = zip(value.groups, value.sizes, strict=True)
        shard_sizes = (n / self.by_data({g}) / self.by_model({g}) for g, n in sizes if g in along)
        return min(map(padded, shard_sizes), default=1.0)

    def entering_bytes(self, value: Value) -> float:
        """Return the bytes of rows that enter the stages, for all microbatches, on each device."""
        return self.layout.micro * self.microbatch.bytes_of(value)

    def summed_bytes(self, value: Value) -> float:
        """Return the bytes of a sum over microbatches on each device, at least in float32."""
        return max(1.0, _SUM_ITEM / value.itemsize) * self.bytes_of(value)

    def shards_products(self, ops: tuple[Op, ...]) -> bool:
        """Return True if the model axis shards a dot or a convolution of a program."""
        return any(
            self.shards_products(op.body)
            or (
                op.kind in ("dot", "conv")
                and any(self.by_model(set(value.groups)) > 1 for value in (*op.ins, *op.outs))
            )
            for op in ops
        )

    def role(self, tensor: Tensor) -> str:
        """Return `parameter`, `state`, `read` or `batch`."""
        if tensor.role != "carried":
            return tensor.role
        return "state" if tensor.value.number in self._states else "parameter"

    def spec(self, tensor: Tensor) -> Spec:
        """Return the spec of an input of the step."""
        if tensor.path in self._given:
            return self._given[tensor.path]
        value = tensor.value
        key = value.groups, value.sizes, self.role(tensor)
        if key not in self._specs:  # equal for both moments of Adam
            self._specs[key] = self._found_spec(tensor)
        return self._specs[key]

    def _found_spec(self, tensor: Tensor) -> Spec:
        value = tensor.value
        spec: list[tuple[str, ...]] = [() for _ in value.sizes]
        if tensor.role == "batch":
            axes = tuple(axis for axis, size in self.layout.axes.items() if size > 1)
            if spec and not value.sizes[0] % prod(self.layout.axes.values()):
                spec[0] = axes  # as loaded; the step gathers it along the model axis
            return tuple(spec)
        if not self.layout.split.isdisjoint(value.groups):
            spec[_first(value, self.layout.split)] = (MODEL,)
        has_layers = not self.model.layers.isdisjoint(value.groups)
        if self.layout.stage > 1 and (has_layers or self._is_stacked(value)):
            dim = self._dimension_for_stages(value, spec)
            if dim >= 0:
                spec[dim] = (STAGE, *spec[dim])
        if self._is_sharded(tensor):
            dim = self._dimension_for_data(value, spec)
            if dim >= 0:
                spec[dim] = (*spec[dim], DATA)
        return tuple(spec)

    def device_bytes(self, tensor: Tensor) -> int:
        """Return the exact bytes of an input on each device."""
        if not tensor.used:
            return 0
        parts = prod(self._axes[axis] for axes in self.spec(tensor) for axis in axes)
        return tensor.value.nbytes // parts

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return True if an input is sharded over the data axis and gathered for its use."""
        is_parameter = self.role(tensor) == "parameter"
        return is_parameter and self._is_sharded(tensor) and not self._is_alone(tensor.value)

    def exchanged(self, op: Op) -> Exchange | None:
        """Return the transfer of an operation that reads or updates rows of a sharded table."""
        if op.kind not in ("lookup", "scatter"):
            return None
        groups = (op.ins[0] if op.kind == "lookup" else op.outs[0]).groups
        if groups not in self._sharded_tables:
            return None
        sent = filter(self.has_rows, op.outs if op.kind == "lookup" else op.ins)
        rows = max(sent, key=lambda value: value.nbytes, default=None)
        if rows is None:
            return None
        whole = self.bytes_of(rows) * self.by_data(set(rows.groups)) / self.layout.replicate
        is_by_rows = self._sharded_tables[groups] in self.model.tables[groups].rows
        return Exchange(whole if is_by_rows else self.bytes_of(rows), is_by_rows)

    def is_table_gradient(self, value: Value) -> bool:
        """Return True if a value is the gradient of a sharded table that is never gathered."""
        return self._is_alone(value) and value.groups in self._sharded_tables

    def _is_alone(self, value: Value) -> bool:
        """Return True if a value has the shape of a table that is only used for look-ups."""
        table = self.model.tables.get(value.groups)
        return table is not None and table.is_alone

    def bytes_in(self, op: Op, value: Value) -> float:
        """Return the bytes of an operation's value on each device.

        Operations without rows of the batch are sharded like the state that they update.
        """
        if value.groups not in self._sharded_states or op.kind == "lookup":
            return self.bytes_of(value)
        has_rows = any(map(self.has_rows, (*op.ins, *op.outs)))
        is_apart = not has_rows or (value in op.outs and self.exchanged(op) is not None)
        return self.bytes_of(value) / (self.layout.shards if is_apart else 1)

    @cached_property
    def _sharded_states(self) -> frozenset[tuple[int, ...]]:
        """Groups of carried arrays that are sharded over the data axis."""
        return frozenset(t.value.groups for t in self.model.tensors if self._is_sharded(t))

    @cached_property
    def _sharded_tables(self) -> dict[tuple[int, ...], int]:
        """The group that the data axis shards, by the groups of a table."""
        found: dict[tuple[int, ...], int] = {}
        for tensor in self.model.tensors:
            groups = tensor.value.groups
            if groups in self.model.tables and self.role(tensor) == "parameter":
                sharded = (
                    group
                    for group, axes in zip(groups, self.spec(tensor), strict=True)
                    if DATA in axes
                )
                found.update((groups, group) for group in sharded)
        return found

    def _is_sharded(self, tensor: Tensor) -> bool:
        """Return True if an input other than the batch is sharded over the data axis."""
        if self.layout.shards == 1 or tensor.value.size < SMALLEST or tensor.role != "carried":
            return False
        return self.layout.zero == 3 or (self.layout.zero == 1 and self.role(tensor) == "state")

    def _dimension_for_stages(self, value: Value, spec: list[tuple[str, ...]]) -> int:
        """Return the dimension that the stages shard; -1 if each has the whole array.

        Stages shard the dimension of the layers if they divide it, otherwise another dimension.
        """
        stages = self.layout.stage
        if self._is_stacked(value):
            dim = shared_dimension(value.sizes, stages, -1)
        else:
            dim = _first(value, self.model.layers)
        if self.is_uneven(value):
            dim = shared_dimension(value.sizes, stages, dim)
        parts = stages * prod(self._axes[axis] for axis in spec[dim])
        return -1 if value.sizes[dim] % parts else dim

    def _dimension_for_data(self, value: Value, spec: list[tuple[str, ...]]) -> int:
        """Return the largest dimension that can be sharded, preferably one that is whole.

        If parameters are sharded, dimensions of a table that rows are looked up along come last.
        """
        axes = self._axes
        table = self.model.tables.get(value.groups) if self.layout.zero == 3 else None
        looked_up = table.rows if table is not None else frozenset[int]()
        fitting = [
            dim
            for dim, size in enumerate(value.sizes)
            if not size % (self.layout.shards * prod(axes[axis] for axis in spec[dim]))
        ]

        def worth(dim: int) -> tuple[bool, bool, int, int]:
            return value.groups[dim] not in looked_up, not spec[dim], value.sizes[dim], -dim

        return max(fitting, key=worth, default=-1)


def _first(value: Value, groups: frozenset[int]) -> int:
    """Return the first dimension of a value that is in one of these groups."""
    return next(dim for dim, group in enumerate(value.groups) if group in groups)


def split_by(model: Model, specs: Iterable[Spec]) -> frozenset[int]:
    """Return the groups that the model axis shards.

    Args:
        model: the step.
        specs: specs of its first tensors; those of batches are ignored, as all axes shard them.
    """
    return frozenset(
        group
        for tensor, spec in zip(model.tensors, specs, strict=False)
        for group, axes in zip(tensor.value.groups, spec, strict=False)
        if MODEL in axes and tensor.role != "batch"
    )
