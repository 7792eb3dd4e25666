"""Steps written by hand for tests of the planner: a linear layer, and a scan over layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.planner.cost.time import Target
from nbdist.planner.graph.model import Group, Model, Op, Tensor, Value, tables_of
from nbdist.planner.hardware.efficiency import PYTORCH_A100
from nbdist.planner.hardware.lookup import find
from nbdist.planner.hardware.topology import extents
from nbdist.records import Level, Topology

if TYPE_CHECKING:
    from nbdist.planner.graph.layout import Layout
    from nbdist.records import Extent

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


def value(
    number: int, sizes: tuple[int, ...], groups: tuple[int, ...], dtype: str = "float32"
) -> Value:
    return Value(number, sizes, groups, ITEM_BYTES[dtype], dtype)


def stream(name: str, ins: tuple[Value, ...], *outs: Value) -> Op:
    return Op("stream", name, ins, outs)


ROWS, WIDE, OUT = range(3)
"""Groups of the linear step: 32 rows, 64 inputs and 128 outputs."""

W = value(0, (64, 128), (WIDE, OUT))
M = value(1, (64, 128), (WIDE, OUT))
X = value(2, (32, 64), (ROWS, WIDE))
Y = value(3, (32, 128), (ROWS, OUT))
GRADIENT = value(4, (64, 128), (WIDE, OUT))
NEW_M = value(5, (64, 128), (WIDE, OUT))
NEW_W = value(6, (64, 128), (WIDE, OUT))

FORWARD = Op("dot", "dot_general", (X, W), (Y,), (WIDE,), 2.0 * 32 * 64 * 128, 64)
BACKWARD = Op("dot", "dot_general", (X, Y), (GRADIENT,), (ROWS,), 2.0 * 32 * 64 * 128, 32)

LINEAR = Model(
    tensors=(
        Tensor("w", "carried", W),
        Tensor("m", "carried", M),
        Tensor("x", "batch", X),
    ),
    groups=(Group(32, "x dimension 0"), Group(64, "w dimension 0"), Group(128, "w dimension 1")),
    ops=(FORWARD, BACKWARD, stream("add", (M, GRADIENT), NEW_M), stream("sub", (W, NEW_M), NEW_W)),
    results=frozenset({NEW_M.number, NEW_W.number}),
)
"""A product and its gradient, with a moment `m`."""

STATES = frozenset({M.number})
"""States of both steps; the number of `m` is the same."""


LAYER, SAVED_LAYER, FEATURE = range(1, 4)
"""Groups of the scan over 8 layers, beside `ROWS`: 64 rows of 16 features."""

SCALE = value(0, (8, 16), (LAYER, FEATURE))
MOMENT = value(1, (8, 16), (LAYER, FEATURE))
INPUT = value(2, (64, 16), (ROWS, FEATURE))
OUTPUT = value(3, (64, 16), (ROWS, FEATURE))
SAVED = value(4, (8, 64, 16), (SAVED_LAYER, ROWS, FEATURE))
SLOPE = value(5, (64, 16), (ROWS, FEATURE))
INPUT_SLOPE = value(6, (64, 16), (ROWS, FEATURE))
SCALE_SLOPE = value(7, (8, 16), (LAYER, FEATURE))
NEW_MOMENT = value(8, (8, 16), (LAYER, FEATURE))
NEW_SCALE = value(9, (8, 16), (LAYER, FEATURE))

_OWN_SCALE = value(20, (16,), (FEATURE,))
_OWN_INPUT, _OWN_OUTPUT, _OWN_SAVED, _OWN_SLOPE, _OWN_INPUT_SLOPE, _FACTOR, _PRODUCT = (
    value(number, (64, 16), (ROWS, FEATURE)) for number in range(21, 28)
)
_OWN_SCALE_SLOPE = value(28, (16,), (FEATURE,))

FORWARD_SCAN = Op(
    "loop",
    "scan",
    (INPUT, SCALE),
    (OUTPUT, SAVED),
    times=8,
    body=(stream("mul", (_OWN_INPUT, _OWN_SCALE), _OWN_OUTPUT),),
    carried=(OUTPUT,),
    over=(SCALE, SAVED),
)
BACKWARD_SCAN = Op(
    "loop",
    "scan",
    (SLOPE, SCALE, SAVED),
    (INPUT_SLOPE, SCALE_SLOPE),
    times=8,
    body=(
        stream("tanh", (_OWN_SAVED,), _FACTOR),
        stream("mul", (_FACTOR, _OWN_SLOPE), _PRODUCT),
        Op("reduce", "reduce_sum", (_FACTOR, _PRODUCT), (_OWN_SCALE_SLOPE,), (ROWS,)),
        stream("mul", (_OWN_SLOPE, _OWN_SCALE), _OWN_INPUT_SLOPE),
    ),
    carried=(INPUT_SLOPE,),
    over=(SCALE, SAVED, SCALE_SLOPE),
)
LOSS = stream("loss", (OUTPUT,), SLOPE)

SCAN = Model(
    tensors=(
        Tensor("scale", "carried", SCALE),
        Tensor("m", "carried", MOMENT),
        Tensor("x", "batch", INPUT),
    ),
    groups=(
        Group(64, "x dimension 0"),
        Group(8, "scale dimension 0", "a scan goes over it"),
        Group(8, "", "a scan goes over it"),
        Group(16, "scale dimension 1"),
    ),
    ops=(
        FORWARD_SCAN,
        LOSS,
        BACKWARD_SCAN,
        stream("add", (MOMENT, SCALE_SLOPE), NEW_MOMENT),
        stream("sub", (SCALE, NEW_MOMENT), NEW_SCALE),
    ),
    results=frozenset({NEW_MOMENT.number, NEW_SCALE.number}),
    layers=frozenset({LAYER, SAVED_LAYER}),
)
"""Layers that scale their features, in a scan, with a moment `m`."""


ENTRY, COLUMN, ID = range(3)
"""Groups of the table: 256 rows of 64 columns, and 32 indices."""

TABLE = value(0, (256, 64), (ENTRY, COLUMN))
IDS = value(1, (32,), (ID,), "int32")
FOUND = value(2, (32, 64), (ID, COLUMN))
FOUND_SLOPE = value(3, (32, 64), (ID, COLUMN))
ZEROS = value(4, (256, 64), (ENTRY, COLUMN))
TABLE_SLOPE = value(5, (256, 64), (ENTRY, COLUMN))
NEW_TABLE = value(6, (256, 64), (ENTRY, COLUMN))

LOOKUP = Op("lookup", "gather", (TABLE, IDS), (FOUND,), (ENTRY,))
SCATTER = Op("scatter", "scatter-add", (ZEROS, IDS, FOUND_SLOPE), (TABLE_SLOPE,), (ID,))


def table_step(*others: Op) -> Model:
    """Return a step that looks up rows of a table, with other operations before its update."""
    slope = stream("mul", (FOUND,), FOUND_SLOPE)
    update = stream("sub", (TABLE, TABLE_SLOPE), NEW_TABLE)
    model = Model(
        tensors=(Tensor("table", "carried", TABLE), Tensor("ids", "batch", IDS)),
        groups=(Group(256, "table dimension 0"), Group(64, "table dimension 1"), Group(32, "ids")),
        ops=(LOOKUP, slope, SCATTER, *others, update),
        results=frozenset({NEW_TABLE.number}),
    )
    return replace(model, tables=tables_of(model))


SEQUENCE = 3
"""Group of the sequence of a feed-forward layer with 8 rows of 16 words of 64 features."""

UP = value(0, (64, 128), (1, 2))
DOWN = value(1, (128, 64), (2, 4))
WORDS = value(2, (8, 16, 64), (0, SEQUENCE, 1))
INNER = value(3, (8, 16, 128), (0, SEQUENCE, 2))
WORDS_OUT = value(4, (8, 16, 64), (0, SEQUENCE, 4))
UP_DOT = Op("dot", "dot_general", (WORDS, UP), (INNER,), (1,), 0.0, 64)
DOWN_DOT = Op("dot", "dot_general", (INNER, DOWN), (WORDS_OUT,), (2,), 0.0, 128)
NORM = stream("norm", (WORDS_OUT,), value(5, (8, 16, 64), (0, SEQUENCE, 4)))
WORDS_MODEL = Model(
    tensors=(Tensor("up", "carried", UP), Tensor("x", "batch", WORDS)),
    groups=tuple(Group(size, "") for size in (8, 64, 128, 16, 64)),
    ops=(UP_DOT, DOWN_DOT, NORM),
)
"""A feed-forward layer, whose output can be sharded along the sequence."""


A100 = find("A100-80GB")


def devices(inside: int, hosts: int = 1) -> Target:
    """Return hosts of A100s with a network between them."""
    host = Level(name="host", size=inside, latency_s=3e-6, bytes_per_s=300e9)
    network = Level(
        name="network", size=hosts, latency_s=14e-6, bytes_per_s=25e9, alone_bytes_per_s=25e9
    )
    levels = (host, network) if hosts > 1 else (host,)
    assert A100 is not None
    return Target(Topology(chip=A100, levels=levels), PYTORCH_A100)


def extents_of(layout: Layout, target: Target) -> dict[str, Extent]:
    return extents(layout.axes, target.topology)
