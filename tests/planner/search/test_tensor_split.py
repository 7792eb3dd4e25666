"""Dimensions that the model axis shards: reasons against it, and the choice of the program."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nbdist.planner.graph.layout import Layout
from nbdist.planner.graph.model import Group, Model, Op, Tensor
from nbdist.planner.search.tensor_split import MANY, split_for, splittable
from tests.planner.steps import LINEAR, OUT, ROWS, WIDE, devices, extents_of, value

SIZES = {ROWS: 4096, WIDE: 4096, OUT: 16384}
"""Sizes of the two products of a feed-forward layer: of its rows, its width and its inner width."""

UP = value(0, (SIZES[WIDE], SIZES[OUT]), (WIDE, OUT), "bfloat16")
DOWN = value(1, (SIZES[OUT], SIZES[WIDE]), (OUT, WIDE), "bfloat16")
ENTERING, LEAVING = (value(n, (SIZES[ROWS], SIZES[WIDE]), (ROWS, WIDE), "bfloat16") for n in (2, 4))
INNER = value(3, (SIZES[ROWS], SIZES[OUT]), (ROWS, OUT), "bfloat16")
TENSORS = (
    Tensor("up", "carried", UP),
    Tensor("down", "carried", DOWN),
    Tensor("x", "batch", ENTERING),
)
FEED_FORWARD = Model(
    tensors=TENSORS,
    groups=tuple(Group(size, "") for size in SIZES.values()),
    ops=(
        Op("dot", "up", (ENTERING, UP), (INNER,), (WIDE,), 1.0, SIZES[WIDE]),
        Op("dot", "down", (INNER, DOWN), (LEAVING,), (OUT,), 1.0, SIZES[OUT]),
    ),
)


def chosen(
    model: Model, parts: int = 4, *, budget: float = math.inf, large: tuple[Tensor, ...] = ()
) -> frozenset[int] | None:
    layout, target = Layout(1, parts), devices(parts)
    extents = extents_of(layout, target)
    return split_for(model, model.ops, layout, frozenset(), target, extents, budget, large)


def test_inner_dimension_of_a_feed_forward_layer_is_sharded() -> None:
    """One sum at the end costs less than a sum after each product."""
    assert chosen(FEED_FORWARD) == {OUT}


def test_loops_are_priced_too() -> None:
    loop = Op("loop", "scan", (ENTERING,), (LEAVING,), times=3, body=FEED_FORWARD.ops)
    assert chosen(replace(FEED_FORWARD, ops=(loop,))) == {OUT}


def test_group_that_is_blocked_or_indivisible_is_not_sharded() -> None:
    groups = list(FEED_FORWARD.groups)
    for other in (replace(groups[OUT], blocked="a scan"), replace(groups[OUT], divisor=6)):
        model = replace(FEED_FORWARD, groups=(*groups[:OUT], other))
        assert chosen(model) == {WIDE}
    none = tuple(replace(group, divisor=3) for group in groups)
    assert chosen(replace(FEED_FORWARD, groups=none)) is None


UNUSED_GROUP = 3
EXTRA = value(9, (2**16, 2**14), (UNUSED_GROUP, -1), "bfloat16")
MORE = replace(
    FEED_FORWARD,
    tensors=(*TENSORS, Tensor("extra", "carried", EXTRA)),
    groups=(*FEED_FORWARD.groups, Group(2**16, "")),
)
"""The layer beside a large array that no operation reads."""


def test_budget_shards_arrays_that_save_no_time() -> None:
    given = sum(tensor.value.nbytes for tensor in MORE.tensors)
    saved = EXTRA.nbytes * 3 // 4
    assert chosen(MORE, budget=given - saved) == {OUT, UNUSED_GROUP}
    # A budget that cannot be kept is ignored.
    assert OUT in (chosen(MORE, budget=1) or ())


def test_large_tables_are_sharded() -> None:
    extra = MORE.tensors[-1]
    assert UNUSED_GROUP in (chosen(MORE, large=(extra,)) or ())
    fixed = replace(extra, value=replace(EXTRA, groups=(-1, -1)))
    assert chosen(FEED_FORWARD, large=(fixed,)) == {OUT}


def test_one_dimension_of_an_array_is_sharded() -> None:
    """Both dimensions would save time."""
    square = value(0, (4096, 4096), (0, 1))
    other = value(1, (4096, 4096), (0, 1))
    model = Model(
        tensors=(Tensor("w", "carried", square),),
        groups=(Group(4096, ""), Group(4096, "")),
        ops=(Op("stream", "mul", (square,), (other,)),),
    )
    assert len(chosen(model) or ()) == 1


def layers(count: int, *, tied: bool = False) -> Model:
    """Return a step with layers of two matrices each; if tied, one has both of their dimensions."""
    tensors, groups, ops = list[Tensor](), [Group(SIZES[ROWS], ""), Group(SIZES[WIDE], "")], []
    for layer in range(count):
        inner = len(groups)
        groups.append(Group(SIZES[OUT], f"layers[{layer}]"))
        up, down = replace(UP, groups=(1, inner)), replace(DOWN, groups=(inner, 1))
        up, down = replace(up, number=10 * layer + 10), replace(down, number=10 * layer + 11)
        own = replace(INNER, number=10 * layer + 12, groups=(0, inner))
        tensors += [Tensor(f"layers[{layer}].up", "carried", up)]
        tensors += [Tensor(f"layers[{layer}].down", "carried", down)]
        entering, leaving = (replace(each, groups=(0, 1)) for each in (ENTERING, LEAVING))
        ops += [Op("dot", "up", (entering, up), (own,), (1,), 1.0, SIZES[WIDE])]
        ops += [Op("dot", "down", (own, down), (leaving,), (inner,), 1.0, SIZES[OUT])]
    if tied:
        both = value(9999, (SIZES[OUT], SIZES[OUT]), (2, 3), "bfloat16")
        tensors.append(Tensor("both", "carried", both))
    tensors.append(Tensor("x", "batch", ENTERING))
    return Model(tuple(tensors), tuple(groups), tuple(ops))


@pytest.mark.parametrize("count", [2, MANY, MANY + 1])
def test_repeated_layers_are_sharded_alike(count: int) -> None:
    assert chosen(layers(count)) == set(range(2, 2 + count))


@pytest.mark.parametrize(("count", "is_sharded"), [(MANY - 1, False), (MANY, True)])
def test_many_equal_groups_are_decided_together(count: int, is_sharded: bool) -> None:
    """The first layer would not be sharded alone: its products are replaced by a large sum."""
    model = layers(count)
    few, large = value(9997, (SIZES[OUT],), (2,)), value(9998, (2**14, 2**14), (-1, -1))
    summed = Op("reduce", "reduce_sum", (few,), (large,), (2,))
    found = chosen(replace(model, ops=(summed, *model.ops[2:])))
    assert found is not None
    assert (2 in found) is is_sharded
    assert set(range(3, 2 + count)) <= found


def test_layers_are_decided_one_by_one_if_an_array_has_two_of_them() -> None:
    found = chosen(layers(MANY + 1, tied=True))
    assert found is not None
    assert len(found & {2, 3}) == 1
    assert set(range(4, MANY + 3)) <= found


def reasons(model: Model, parts: int) -> dict[int, str]:
    return splittable(model, parts)


def test_reasons_against_sharding() -> None:
    assert reasons(LINEAR, 4) == {WIDE: "", OUT: ""}
    assert reasons(LINEAR, 48) == {
        WIDE: "64 is not a multiple of 48 (pad it by 32)",
        OUT: "128 is not a multiple of 48 (pad it by 16)",
    }
    blocked = replace(LINEAR.groups[OUT], blocked="a scan goes over it", divisor=5)
    model = replace(LINEAR, groups=(*LINEAR.groups[:OUT], blocked))
    assert reasons(model, 4)[OUT] == "a scan goes over it"
    rows = Tensor("bias", "read", value(9, (32, 1), (ROWS, -1)))
    assert reasons(replace(LINEAR, tensors=(*LINEAR.tensors, rows)), 4)[ROWS] == (
        "it belongs to the batch"
    )
    batch_only = replace(LINEAR, tensors=LINEAR.tensors[2:])
    assert reasons(batch_only, 4) == {}


@pytest.mark.parametrize("is_inner", [False, True])
def test_dimension_that_an_operation_has_twice_is_not_sharded(is_inner: bool) -> None:
    square = value(9, (64, 64), (WIDE, WIDE))
    product = Op("dot", "dot_general", (square,), (value(10, (1, 64), (-1, -1)),))
    op = Op("loop", "scan", (), (), body=(product,)) if is_inner else product
    model = replace(LINEAR, ops=(*LINEAR.ops, op))
    assert reasons(model, 4) == {WIDE: "an operation has it in two dimensions", OUT: ""}
