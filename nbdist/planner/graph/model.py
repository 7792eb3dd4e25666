"""A training step as a planner sees it: arrays, dimensions that must agree, operations.

Nothing here holds data: a model of 175 billion parameters is some thousand small objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Role = Literal["carried", "read", "batch"]

Kind = Literal["dot", "conv", "lookup", "scatter", "reduce", "stream", "loop"]
"""`lookup`: rows taken by index; `scatter`: rows added by index; `stream`: element by element;
`loop`: its body is run `times` times."""


class Table(NamedTuple):
    """An array that rows are looked up in.

    Attributes:
        rows: groups of the dimensions that are looked up along.
        is_alone: the batch meets it in nothing else.
    """

    rows: frozenset[int]
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Value:
    """An array in a step.

    Attributes:
        number: which one it is in the step.
        sizes: its shape.
        groups: for each dimension, which group of dimensions it is of; -1 where its size is 1.
        itemsize: bytes of an element.
        dtype: of an element.
        nbytes: of all.
    """

    number: int
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    itemsize: int
    dtype: str
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.size * self.itemsize)  # asked for very often

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def is_inexact(self) -> bool:
        """Whether it is of real or complex numbers."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array that the step is given.

    Attributes:
        path: the expression that leads to it, `params['w1']`.
        role: carried from step to step, only read, or of the batch.
        used: whether the step needs it; XLA leaves out what it does not.
    """

    path: str
    role: Role
    value: Value
    used: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Dimensions that must be cut alike, as operations tie them.

    Attributes:
        divisor: the largest number that divides all their sizes.
        name: one of them, `params['w1'] dimension 1`.
        blocked: why they cannot be cut over devices that hold the model; empty if they can.
    """

    divisor: int
    name: str
    blocked: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation, or some that are made together.

    Attributes:
        kind: what it is.
        name: the primitive's.
        ins: what it reads.
        outs: what it makes.
        summed: groups that it sums over: cut ones leave each device with a part of the sum.
        flops: floating-point operations, once.
        contract: of a `dot` or a `conv`, the length of each sum.
        times: how often it is run.
        body: of a `loop`, what is run.
        carried: of a `loop`, what goes from round to round.
        over: of a scan, the arrays that it goes over, and those that its rounds leave.
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


@dataclass(frozen=True, slots=True)
class Model:
    """One step, from what it is given to what it leaves.

    Attributes:
        tensors: what it is given, in order.
        groups: of dimensions; `Value.groups` and `Op.summed` count in it.
        ops: in the order in which they are made.
        results: numbers of the values that it leaves.
        apart: why the batch and the model cannot both be cut; empty if they can.
        notes: what could not be looked into.
        layers: groups that scans over layers go over: see `planner/graph/layers.py`.
        added: products' results that are added up before they are used: see
            `planner/graph/summed_products.py`.
        tables: what rows are looked up in, by its groups: see `planner/graph/lookup_tables.py`.
        images: what convolutions are given and make, by its groups: see
            `planner/graph/tpu_padding.py`.
    """

    tensors: tuple[Tensor, ...]
    groups: tuple[Group, ...]
    ops: tuple[Op, ...]
    results: frozenset[int] = frozenset()
    apart: str = ""
    notes: tuple[str, ...] = ()
    layers: frozenset[int] = frozenset()
    added: Mapping[int, int] = field(default_factory=dict)
    tables: Mapping[tuple[int, ...], Table] = field(default_factory=dict)
    images: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)

    @property
    def every_op(self) -> Iterator[Op]:
        """Those of loops too, after the loop."""
        return _every(self.ops)

    @property
    def batch_groups(self) -> frozenset[int]:
        """Those that the batch's rows are in."""
        rows = (t.value for t in self.tensors if t.role == "batch" and t.value.sizes)
        return frozenset(value.groups[0] for value in rows if value.groups[0] >= 0)

    @property
    def rows(self) -> int:
        """Samples in a global batch; 1 where it has none."""
        sizes = [t.value.sizes[0] for t in self.tensors if t.role == "batch" and t.value.sizes]
        return max(sizes, default=1)


def _every(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _every(op.body)
