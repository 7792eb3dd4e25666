"""Model of a training step: arrays, dimensions that must agree, operations.

It holds no data: a model of 175 billion parameters is some thousand small objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Role = Literal["carried", "read", "batch"]

Kind = Literal["dot", "conv", "attention", "lookup", "scatter", "reduce", "stream", "loop"]
"""Kinds of operations. `attention`: one kernel, as of fused attention; its scores stay on the chip.
`lookup`: rows are taken by index. `scatter`: rows are added by index. `stream`: element by element.
`loop`: the body runs `times` times."""


class Table(NamedTuple):
    """An array that rows are looked up in.

    Attributes:
        rows: groups of the dimensions that are looked up along.
        is_alone: True if look-ups are the only operations on it with the batch.
    """

    rows: frozenset[int]
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Value:
    """An array in a step.

    Attributes:
        number: its number in the step.
        sizes: its shape.
        groups: the group of each dimension; -1 if its size is 1.
        itemsize: bytes of an element.
        dtype: type of an element.
        nbytes: bytes of the array.
    """

    number: int
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    itemsize: int
    dtype: str
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.size * self.itemsize)  # read very often

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_inexact(self) -> bool:
        """True for real and complex numbers."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of the step.

    Attributes:
        path: the expression that leads to it, `params['w1']`.
        role: carried from step to step, only read, or part of the batch.
        used: True if the step needs it; XLA drops other inputs.
    """

    path: str
    role: Role
    value: Value
    used: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Dimensions that operations tie: all are sharded, or none is.

    Attributes:
        divisor: the largest number that divides all their sizes.
        name: one of them, `params['w1'] dimension 1`.
        blocked: reason why the model axis cannot shard them; empty if it can.
    """

    divisor: int
    name: str
    blocked: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation, or several that are fused.

    Attributes:
        kind: its kind.
        name: name of the primitive.
        ins: values that it reads.
        outs: values that it makes.
        summed: groups that it sums over; if one is sharded, each device has a part of the sum.
        flops: floating-point operations of one run.
        contract: length of each sum of a `dot` or a `conv`.
        times: number of runs.
        body: operations of a `loop`.
        carried: values that a `loop` carries from iteration to iteration.
        over: arrays that a scan goes over, and those that its iterations leave.
    """

    kind: Kind
    name: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    summed: tuple[int, ...] = ()
    flops: float = 0.0
    contract: int = 1
    times: int = 1
    body: tuple[Op, ...] = ()
    carried: tuple[Value, ...] = ()
    over: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Model:
    """A step, from its inputs to its results.

    Attributes:
        tensors: its inputs, in order.
        groups: groups of dimensions; `Value.groups` and `Op.summed` are indices of it.
        ops: operations in order.
        results: numbers of the values that it leaves.
        apart: reason why the batch and the model cannot both be sharded; empty if they can.
        notes: parts that the model does not describe exactly.
        unpriced: primitives whose computing time is unknown; only their memory traffic counts.
        layers: groups that scans over layers go over: see `planner/graph/layers.py`.
        stacked: groups of parameters that the step stacks for a scan over layers. They are separate
            arrays, which have no dimension of layers.
        added: results of products that are only added: see `added_up` in `planner/graph/fusion.py`.
        tables: arrays that rows are looked up in, by their groups: see `tables_of`.
        images: inputs and results of convolutions, by their groups: see
            `planner/graph/tpu_padding.py`.
    """

    tensors: tuple[Tensor, ...]
    groups: tuple[Group, ...]
    ops: tuple[Op, ...]
    results: frozenset[int] = frozenset()
    apart: str = ""
    notes: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    layers: frozenset[int] = frozenset()
    stacked: frozenset[tuple[int, ...]] = frozenset()
    added: Mapping[int, int] = field(default_factory=dict)
    tables: Mapping[tuple[int, ...], Table] = field(default_factory=dict)
    images: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)

    @property
    def every_op(self) -> Iterator[Op]:
        """All operations; those of a loop follow it."""
        return _every(self.ops)

    @cached_property
    def batch_groups(self) -> frozenset[int]:
        """Groups of the batch's rows."""
        rows = (t.value for t in self.tensors if t.role == "batch" and t.value.sizes)
        return frozenset(value.groups[0] for value in rows if value.groups[0] >= 0)

    @cached_property
    def doubled(self) -> frozenset[int]:
        """Groups that a value of an operation has twice: one axis cannot shard both."""
        found: set[int] = set()
        for groups in {v.groups for op in self.every_op for v in (*op.ins, *op.outs)}:
            if len(set(groups)) < len(groups):
                found.update(g for g in groups if g >= 0 and groups.count(g) > 1)
        return frozenset(found)

    @cached_property
    def primitives(self) -> frozenset[str]:
        """Names of the primitives of all operations."""
        return frozenset(op.name for op in self.every_op)

    @cached_property
    def loops(self) -> tuple[Op, ...]:
        """All operations with a body."""
        return tuple(op for op in self.every_op if op.body)

    @cached_property
    def products(self) -> tuple[Op, ...]:
        """All products of two arrays; those of a loop precede it."""
        return tuple(_products(self.ops))

    @property
    def rows(self) -> int:
        """Samples in a global batch; 1 if there is no batch."""
        sizes = [t.value.sizes[0] for t in self.tensors if t.role == "batch" and t.value.sizes]
        return max(sizes, default=1)


def _every(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _every(op.body)


def _products(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield from _products(op.body)
        if op.kind == "dot":
            yield op


def tables_of(model: Model) -> Mapping[tuple[int, ...], Table]:
    """Return the carried arrays that rows are looked up in, by their groups.

    A table that is sharded over the data axis need not be gathered. XLA looks rows up on the device
    that has them (seen in programs for H100, v5e and CPU). If columns are sharded, each device
    takes its columns of all rows, and an all-to-all returns whole rows; the gradient takes the same
    way back. If rows are sharded, each device takes the rows that it has, and a reduce-scatter sums
    them.

    Args:
        model: the step; its `tables` are ignored.
    """
    carried = {t.value.groups for t in model.tensors if t.role == "carried"}
    found: dict[tuple[int, ...], set[int]] = {}
    for op in model.every_op:
        if op.kind == "lookup" and op.ins[0].groups in carried:
            found.setdefault(op.ins[0].groups, set()).update(op.summed)
    batch = model.batch_groups
    met = set().union(*(_met(op, batch) for op in model.every_op)) if found else set()
    return {
        groups: Table(frozenset(rows), is_alone=met.isdisjoint(rows))
        for groups, rows in found.items()
        if len(rows) < len(groups) and -1 not in groups
    }


def _met(op: Op, batch: frozenset[int]) -> set[int]:
    """Return the groups of an operation that uses the batch for more than look-ups."""
    if op.kind in ("lookup", "scatter", "loop"):
        return set()
    groups = {group for value in (*op.ins, *op.outs) for group in value.groups}
    return groups if not batch.isdisjoint(groups) else set()
