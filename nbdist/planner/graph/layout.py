"""Which layouts of a step are legal, and how its arrays lie in one.

The axis `data` cuts the batch. `model` cuts groups of dimensions; where a group that is summed over
is cut, each device has a part of the sum (tensor parallelism, arXiv:1909.08053). What is carried
may be cut over `data` as well, and is gathered where it is used (ZeRO, arXiv:1910.02054). `stage`
cuts the layers of scans over layers, which the batch goes through in microbatches (GPipe,
arXiv:1811.06965; 1F1B, arXiv:2104.04473). What goes from layer to layer may be cut along the
sequence: `planner/graph/sequence.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from nbdist.planner.graph.layers import is_over_layers
from nbdist.planner.graph.pipeline_schedule import room
from nbdist.planner.graph.sequence import sequence_of
from nbdist.planner.graph.tpu_padding import padded
from nbdist.records import DATA, MODEL, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.planner.graph.model import Model, Op, Tensor, Value
    from nbdist.records import Remat, Schedule, Spec, Zero

SMALLEST = 2**11
"""Elements of an array that is worth cutting over the data axis: gathering a smaller one costs a
message and saves nothing."""

_SUM_ITEM = 4
"""Bytes of an element of what microbatches add to: see `wide` in `jaxpr/microbatches.py`."""


@dataclass(frozen=True)
class Layout:
    """One way to lay a step out.

    Attributes:
        data: devices that share the batch.
        model: devices that share the model.
        split: groups that are cut over `model`.
        zero: what is cut over `data` beside the batch.
        remat: which activations are made again.
        micro: in how many parts the batch is gone through; with stages, it goes through them so.
        stage: into how many stages the layers are cut.
        sequence: whether `model` cuts what products pass on along the sequence.
        schedule: the order in which microbatches go through stages.
        rounds: how often they do: each stage has as many blocks of layers.
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

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, the outermost first: stages send least."""
        stages = {STAGE: self.stage} if self.stage > 1 else {}
        return {**stages, DATA: self.data, MODEL: self.model}

    @property
    def blocks(self) -> int:
        """Of layers: in each tick a stage goes through one."""
        return self.stage * self.rounds

    @property
    def ticks(self) -> int:
        """Until the last microbatch has left the last stage."""
        return self.rounds * self.micro + self.stage - 1

    @property
    def held(self) -> float:
        """Microbatches of which a stage has room for what its layers leave, under 1F1B."""
        return room(self.stage, self.micro, self.rounds) / self.rounds


class Exchange(NamedTuple):
    """What goes over the data axis where a table lies in parts.

    Attributes:
        nbytes: of rows, on each device: its own, or those of all.
        is_by_rows: whether the table is cut along its rows: then the rows of all.
    """

    nbytes: float
    is_by_rows: bool


class ShardedModel:
    """A model in a layout.

    Args:
        model: the step.
        layout: how it is laid out.
        states: numbers of the values that are carried and are no parameters.
        given: how arrays lie, by path, whatever the layout would have.
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
        self._states = states
        self._given = given or {}
        is_cut = model.rows % layout.data == 0  # else every device computes all of the batch
        self._rows = model.batch_groups
        self._batch = self._rows if is_cut else frozenset()
        self._parts = layout.data
        if model.rows % (layout.data * layout.stage) == 0:
            self._parts *= layout.stage  # out of pipelines, each stage has rows of its own
        self.is_microbatch = False
        self.shares = 1
        self._pads = False
        self._known: dict[tuple[int, ...], int] = {}

    def with_layout(self, layout: Layout) -> ShardedModel:
        """The same model in another layout."""
        same = ShardedModel(self.model, layout, self._states, self._given)
        same._pads = self._pads
        return same

    @cached_property
    def on_tpus(self) -> ShardedModel:
        """The same, as TPUs have it in memory; what a step is given is counted as it is."""
        same = self.with_layout(self.layout)
        same._pads = True
        return same

    @cached_property
    def microbatch(self) -> ShardedModel:
        """The same with the rows of one microbatch."""
        few = self.with_layout(self.layout)
        few._parts = self.layout.data * self.layout.micro
        few.is_microbatch = True
        return few

    @cached_property
    def turning(self) -> ShardedModel:
        """The same, where stages share out its rows among them if they can."""
        few = self.with_layout(self.layout)
        few._parts, few.is_microbatch = self.microbatch._parts, True
        if self.model.rows % (few._parts * self.layout.stage) == 0:
            few.shares = self.layout.stage
            few._parts *= few.shares
        return few

    @cached_property
    def sequence(self) -> frozenset[int]:
        """Groups along which what products pass on is cut over the model's axis."""
        layout = self.layout
        if not layout.sequence:
            return frozenset()
        return sequence_of(self.model, layout.split, layout.model)

    @cached_property
    def _gathered(self) -> ShardedModel:
        """The same, with whole sequences."""
        same = self.with_layout(replace(self.layout, sequence=False))
        same._parts, same.is_microbatch = self._parts, self.is_microbatch
        same.shares = self.shares
        return same

    def around(self, op: Op) -> ShardedModel:
        """As an operation has its values: one that the model's axis shares has whole sequences.

        (Not a loop: its body's operations have them.)
        """
        if not self.sequence or op.body:
            return self
        values = (*op.ins, *op.outs)
        is_shared = any(self.by_model({*value.groups, *op.summed}) > 1 for value in values)
        return self._gathered if is_shared else self

    def is_cut_along(self, value: Value) -> bool:
        """Whether it is cut along the sequence, but where an operation needs it whole."""
        groups = set(value.groups)
        is_there = self.has_rows(value) and not self.sequence.isdisjoint(groups)
        return is_there and self.by_model(groups) == 1

    def is_staged(self, op: Op) -> bool:
        """Whether it is a loop that is run as a pipeline."""
        return self.layout.stage > 1 and is_over_layers(op, self.model)

    @property
    def by_stage_too(self) -> bool:
        """Whether rows are cut over the stages as well."""
        return not self.is_microbatch and self._parts > self.layout.data

    def has_rows(self, value: Value) -> bool:
        """Whether it has dimensions of the batch's."""
        return not self._rows.isdisjoint(value.groups)

    def by_data(self, groups: set[int]) -> int:
        """In how many parts the batch is cut where something has dimensions of these groups."""
        return 1 if self._batch.isdisjoint(groups) else self._parts

    def by_model(self, groups: set[int]) -> int:
        """In how many parts the model's axis cuts it."""
        return 1 if self.layout.split.isdisjoint(groups) else self.layout.model

    def by_stage(self, groups: set[int]) -> int:
        """In how many parts the stages' axis cuts its layers; it cuts one dimension alone."""
        is_cut = self.by_stage_too and self.by_data(groups) > 1
        return 1 if is_cut or self.model.layers.isdisjoint(groups) else self.layout.stage

    def parts(self, value: Value) -> int:
        """In how many parts a value of the step is."""
        if value.groups not in self._known:
            groups = set(value.groups)
            by_model = self.layout.model if self.is_cut_along(value) else self.by_model(groups)
            parts = self.by_data(groups) * by_model * self.by_stage(groups)
            self._known[value.groups] = parts
        return self._known[value.groups]

    def bytes_of(self, value: Value) -> float:
        """Of a value of the step, on each device."""
        nbytes = value.nbytes / self.parts(value)
        return nbytes * self._padding(value) if self._pads else nbytes

    def _padding(self, value: Value) -> float:
        """How many times as much room it takes: it lies as that is least."""
        along = self.model.images.get(value.groups, ())
        sizes = zip(value.groups, value.sizes, strict=True)
        cut = (n / self.by_data({g}) / self.by_model({g}) for g, n in sizes if g in along)
        return min(map(padded, cut), default=1.0)

    def entering_bytes(self, value: Value) -> float:
        """Of what goes through stages, of all microbatches, on each device."""
        return self.layout.micro * self.microbatch.bytes_of(value)

    def summed_bytes(self, value: Value) -> float:
        """Of what microbatches add to, on each device: no narrower than float32."""
        return max(1.0, _SUM_ITEM / value.itemsize) * self.bytes_of(value)

    def cuts_products(self, ops: tuple[Op, ...]) -> bool:
        """Whether the model's axis cuts a dot or a convolution among them."""
        return any(
            self.cuts_products(op.body)
            or (
                op.kind in ("dot", "conv")
                and any(self.by_model(set(value.groups)) > 1 for value in (*op.ins, *op.outs))
            )
            for op in ops
        )

    def role(self, tensor: Tensor) -> str:
        """`parameter`, `state`, `read` or `batch`."""
        if tensor.role != "carried":
            return tensor.role
        return "state" if tensor.value.number in self._states else "parameter"

    def spec(self, tensor: Tensor) -> Spec:
        """How an array that the step is given lies on the mesh."""
        if tensor.path in self._given:
            return self._given[tensor.path]
        value = tensor.value
        cut: list[tuple[str, ...]] = [() for _ in value.sizes]
        if tensor.role == "batch":
            axes = tuple(axis for axis, size in self.layout.axes.items() if size > 1)
            if cut and not value.sizes[0] % prod(self.layout.axes.values()):
                cut[0] = axes  # it comes so, and is put together along the data's axis in the step
            return tuple(cut)
        layers = self.model.layers if self.layout.stage > 1 else frozenset()
        for axis, groups in ((STAGE, layers), (MODEL, self.layout.split)):
            dim = next((dim for dim, group in enumerate(value.groups) if group in groups), -1)
            if dim >= 0:
                cut[dim] = (axis,)
        if self._is_sharded(tensor):
            dim = self._dimension_for_data(value, cut)
            if dim >= 0:
                cut[dim] = (*cut[dim], DATA)
        return tuple(cut)

    def device_bytes(self, tensor: Tensor) -> int:
        """On each device, exactly."""
        if not tensor.used:
            return 0
        parts = 1
        for axes in self.spec(tensor):
            for axis in axes:
                parts *= self.layout.axes[axis]
        return tensor.value.nbytes // parts

    def is_gathered(self, tensor: Tensor) -> bool:
        """Whether it is cut over the data axis, and made whole where it is used."""
        is_parameter = self.role(tensor) == "parameter"
        return is_parameter and self._is_sharded(tensor) and not self._is_alone(tensor.value)

    def exchanged(self, op: Op) -> Exchange | None:
        """What devices send each other where rows are looked up in a table, or added to one."""
        if op.kind not in ("lookup", "scatter"):
            return None
        groups = (op.ins[0] if op.kind == "lookup" else op.outs[0]).groups
        if groups not in self._cut_tables:
            return None
        sent = filter(self.has_rows, op.outs if op.kind == "lookup" else op.ins)
        rows = max(sent, key=lambda value: value.nbytes, default=None)
        if rows is None:
            return None
        whole = self.bytes_of(rows) * self.by_data(set(rows.groups))
        is_by_rows = self._cut_tables[groups] in self.model.tables[groups].rows
        return Exchange(whole if is_by_rows else self.bytes_of(rows), is_by_rows)

    def lies_as_table(self, value: Value) -> bool:
        """Whether it is cut as a table that is nowhere put together: it is its gradient."""
        return self._is_alone(value) and value.groups in self._cut_tables

    def _is_alone(self, value: Value) -> bool:
        """Whether it is as a table in which rows are looked up, and nothing else is done."""
        table = self.model.tables.get(value.groups)
        return table is not None and table.is_alone

    def bytes_in(self, op: Op, value: Value) -> float:
        """Of a value of an operation, on each device.

        What never meets the batch is done as the state lies that it is done to.
        """
        if value.groups not in self._cut_states or op.kind == "lookup":
            return self.bytes_of(value)
        has_rows = any(map(self.has_rows, (*op.ins, *op.outs)))
        is_apart = not has_rows or (value in op.outs and self.exchanged(op) is not None)
        return self.bytes_of(value) / (self.layout.data if is_apart else 1)

    @cached_property
    def _cut_states(self) -> frozenset[tuple[int, ...]]:
        """The groups of what is carried and cut over the data axis."""
        return frozenset(t.value.groups for t in self.model.tensors if self._is_sharded(t))

    @cached_property
    def _cut_tables(self) -> dict[tuple[int, ...], int]:
        """By the groups of tables that are cut over the data axis, which of these it cuts."""
        found: dict[tuple[int, ...], int] = {}
        for tensor in self.model.tensors:
            groups = tensor.value.groups
            if groups in self.model.tables and self.role(tensor) == "parameter":
                cut = (
                    group
                    for group, axes in zip(groups, self.spec(tensor), strict=True)
                    if DATA in axes
                )
                found.update((groups, group) for group in cut)
        return found

    def _is_sharded(self, tensor: Tensor) -> bool:
        """Whether it is cut over the data axis though it is no batch."""
        if self.layout.data == 1 or tensor.value.size < SMALLEST or tensor.role != "carried":
            return False
        return self.layout.zero == 3 or (self.layout.zero == 1 and self.role(tensor) == "state")

    def _dimension_for_data(self, value: Value, cut: list[tuple[str, ...]]) -> int:
        """The largest one that can be cut, of those that are whole if there is one.

        Of a table, with parameters cut, rather not one that is looked up along.
        """
        axes = self.layout.axes
        table = self.model.tables.get(value.groups) if self.layout.zero == 3 else None
        looked_up = table.rows if table is not None else frozenset[int]()
        fitting = [
            dim
            for dim, size in enumerate(value.sizes)
            if not size % (self.layout.data * prod(axes[axis] for axis in cut[dim]))
        ]

        def worth(dim: int) -> tuple[bool, bool, int, int]:
            return value.groups[dim] not in looked_up, not cut[dim], value.sizes[dim], -dim

        return max(fitting, key=worth, default=-1)


def split_by(model: Model, specs: Iterable[Spec]) -> frozenset[int]:
    """The groups that the model's axis cuts.

    Args:
        model: the step.
        specs: how its first tensors lie; batches come cut over all axes, which says nothing.
    """
    return frozenset(
        group
        for tensor, spec in zip(model.tensors, specs, strict=False)
        for group, axes in zip(tensor.value.groups, spec, strict=False)
        if MODEL in axes and tensor.role != "batch"
    )
