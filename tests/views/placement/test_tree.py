"""Costs of arrays, their tree, and the rows of a long one."""

from __future__ import annotations

import pytest

from nbdist.records import HOST_MEMORY, Layout, PlacedArray, PlacedDevice, Placement
from nbdist.views.placement.tree import (
    Branch,
    Cost,
    Leaf,
    Row,
    cost,
    dimension_to_shard,
    on_devices,
    on_each,
    rows,
    total,
    tree,
)


def layout(devices: int, *parts: int, owners: int = 1) -> Layout:
    return Layout(kind="sharded", devices=tuple(range(devices)), parts=parts, owners=owners)


def array(*shape: int, nbytes: int = 96, index: int = 0) -> PlacedArray:
    return PlacedArray(("x",), shape, "float32", nbytes, index)


def placement(*paths: str, layouts: tuple[Layout, ...] = (layout(1),)) -> Placement:
    """Return arrays of 8 bytes. Labels of a path are separated by spaces."""
    arrays = tuple(PlacedArray(tuple(path.split()), (2,), "f", 8, 0) for path in paths)
    return Placement(
        names=(),
        hosts={0: "a"},
        devices=(PlacedDevice(0, "cpu:0"),),
        meshes=(),
        layouts=layouts,
        arrays=arrays,
    )


def test_bytes_on_each_device_are_those_of_a_block() -> None:
    assert on_each(array(8, 3), layout(6, 2, 3)) == 16
    assert on_each(array(8, 3), layout(6)) == 96
    assert on_each(array(8, 3), Layout(kind="deleted")) == 0


@pytest.mark.parametrize(
    ("shape", "where", "dimension"),
    [
        ((8, 6), layout(4), 0),
        ((6, 8), layout(4), 1),
        ((6, 6), layout(4), -1),
        ((), layout(4), -1),
        ((0, 4), layout(4), 1),
        ((8, 6), layout(4, 4, 1), -1),  # no copies
        ((8, 6), layout(4, 2, 1), 0),
        ((6, 4), layout(4, 2, 1), 1),
        ((4, 6), layout(4, 2, 1, owners=2), -1),
    ],
)
def test_the_first_divisible_dimension_could_be_sharded(
    shape: tuple[int, ...], where: Layout, dimension: int
) -> None:
    assert dimension_to_shard(array(*shape), where) == dimension


@pytest.mark.parametrize(
    ("where", "shape", "expected"),
    [
        (layout(4), (8, 3), Cost(1, 96, 384, 288)),
        (layout(4), (3, 3), Cost(1, 96, 384, 0)),
        (layout(4, 4), (8,), Cost(1, 96, 96, 0)),
        (layout(4, 2), (8,), Cost(1, 96, 192, 96)),
        (layout(3, owners=3), (8,), Cost(1, 288, 288, 0)),
        (layout(6, owners=3), (8,), Cost(1, 288, 576, 288)),
        (layout(2, 4), (8,), Cost(1, 48, 48, 0)),  # two blocks are gone
        (Layout(kind="deleted"), (8,), Cost(1, 0, 0, 0)),
    ],
)
def test_the_cost_of_an_array_counts_its_copies(
    where: Layout, shape: tuple[int, ...], expected: Cost
) -> None:
    found = cost(array(*shape), where)
    assert found == expected
    assert found.copies == expected.stored - expected.once


def test_bytes_are_added_up_by_device_in_natural_order() -> None:
    names = ("cpu:10", "cpu:2", HOST_MEMORY, "cpu:0", "gpu:0")
    given = Placement(
        names=(),
        hosts={0: "a", 1: "b"},
        devices=tuple(PlacedDevice(int(i == 3), name) for i, name in enumerate(names)),
        meshes=(),
        layouts=(
            Layout(kind="replicated", devices=(0, 1, 3)),
            Layout(kind="host", devices=(2,)),
            Layout(kind="sharded", devices=(4, 0), parts=(2,)),
        ),
        arrays=(array(8), array(8, index=1), array(8, index=2), array(8, nbytes=4)),
    )
    # rank 0 first: cpu:2 before cpu:10 before gpu:0, then rank 1, then the host's memory
    assert list(on_devices(given).items()) == [(1, 100), (0, 148), (4, 48), (3, 100), (2, 96)]


def labels(entries: list[Branch | Leaf]) -> list[object]:
    return [
        entry.label if isinstance(entry, Leaf) else (entry.label, *labels(entry.entries))
        for entry in entries
    ]


def test_arrays_are_grouped_by_path() -> None:
    root = tree(placement("p a w", "p a b", "p c", "q"))
    assert labels(root.entries) == [("p", ("a", "w", "b"), "c"), "q"]
    assert root.cost == Cost(4, 32, 32, 0)
    branch = root.entries[0]
    assert isinstance(branch, Branch)
    assert branch.cost.arrays == 3


def test_a_branch_with_one_branch_is_merged() -> None:
    assert labels(tree(placement("p .a .b w", "p .a .b v")).entries) == [("p.a.b", "w", "v")]
    assert labels(tree(placement("p .a w")).entries) == [("p.a", "w")]
    assert labels(tree(placement("p .a w", "p .b w")).entries) == [("p", (".a", "w"), (".b", "w"))]


def test_costs_are_added_up_by_field() -> None:
    entries: list[Branch | Leaf] = [
        Leaf("a", array(1), Cost(1, 2, 3, 4)),
        Branch("b", cost=Cost(10, 20, 30, 40)),
    ]
    assert total(entries) == Cost(11, 22, 33, 44)
    assert total([]) == Cost()


def shown(given: list[Row]) -> list[str]:
    """Return each row as text: its depth, its label, and the hidden arrays below."""
    return [
        f"{row.depth} {row.entry.label if row.entry else '...'}"
        + (f" ({row.hidden.arrays})" if row.hidden.arrays else "")
        for row in given
    ]


def test_a_short_tree_is_shown_whole() -> None:
    root = tree(placement("p a", "p b", "q"))
    assert shown(rows(root, 4)) == ["0 p", "1 a", "1 b", "0 q"]
    assert shown(rows(root, 3)) == ["0 p (2)", "0 q"]


def test_a_long_branch_is_truncated_to_half() -> None:
    root = tree(placement(*"abcdefg"))
    assert shown(rows(root, 7)) == [f"0 {label}" for label in "abcdefg"]
    assert shown(rows(root, 6)) == ["0 a", "0 b", "0 c", "0 ... (4)"]
    assert shown(rows(root, 1)) == ["0 a", "0 ... (6)"]


def test_the_first_entry_of_a_long_branch_is_open() -> None:
    root = tree(placement("a x", "a y", "b z z", "b z y", *"cdefgh"))
    assert shown(rows(root, 7)) == ["0 a", "1 x", "1 y", "0 bz (2)", "0 c", "0 ... (5)"]
    small = tree(placement("a x", "b y", "b z", *"cdefghij"))
    assert shown(rows(small, 9))[:3] == ["0 a", "1 x", "0 b (2)"]
    large = tree(placement("a w", "a x", "a y", "a z", *"bcdefgh"))
    assert shown(rows(large, 7)) == ["0 a (4)", "0 b", "0 c", "0 ... (5)"]


def test_small_branches_open_before_large_ones() -> None:
    large = [f"p {i}" for i in range(9)]
    root = tree(placement(*large, "q a", "q b"))
    assert shown(rows(root, 5)) == ["0 p (9)", "0 q", "1 a", "1 b"]
    assert shown(rows(root, 7))[0] == "0 p (9)"  # fewer than four rows would remain
    assert shown(rows(root, 8))[:4] == ["0 p", "1 0", "1 1", "1 ... (7)"]


def test_large_branches_share_the_rest() -> None:
    root = tree(placement(*(f"{name} {i}" for name in "pq" for i in range(9))))
    found = shown(rows(root, 12))
    assert [line for line in found if line.startswith("0")] == ["0 p", "0 q"]
    assert found.count("1 ... (7)") == 2
    assert len(found) <= 12


def test_a_branch_with_few_rows_is_not_truncated() -> None:
    root = tree(placement("p a", "p b", "p c", *(f"q {i}" for i in range(9))))
    assert shown(rows(root, 6)) == ["0 p", "1 a", "1 b", "1 c", "0 q (9)"]
