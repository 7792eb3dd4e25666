"""Texts about layouts, meshes, devices and slices."""

from __future__ import annotations

import pytest

from nbdist.records import HOST_MEMORY, Layout, MeshShape, PlacedArray, PlacedDevice, Placement
from nbdist.views.placement import text
from nbdist.views.placement.tree import Cost

DEVICES = (
    *(PlacedDevice(rank, f"gpu:{number}") for rank in range(4) for number in range(2)),
    PlacedDevice(0, HOST_MEMORY),
    PlacedDevice(1, HOST_MEMORY),
)
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def placement(
    *sizes: tuple[Layout, int],
    hosts: dict[int, str] = HOSTS,
    meshes: tuple[MeshShape, ...] = (),
    notes: tuple[str, ...] = (),
) -> Placement:
    """Return one array of a size in bytes for each layout."""
    return Placement(
        names=("p", "q"),
        hosts=hosts,
        devices=DEVICES,
        meshes=meshes,
        layouts=tuple(layout for layout, _ in sizes),
        arrays=tuple(
            PlacedArray(("p",), (8,), "float32", nbytes, index)
            for index, (_, nbytes) in enumerate(sizes)
        ),
        notes=notes,
    )


def on(*devices: int, parts: tuple[int, ...] = ()) -> Layout:
    return Layout(kind="sharded", devices=devices, parts=parts)


def facts(given: Placement, cost: Cost = Cost()) -> list[str]:  # noqa: B008 - frozen
    return list(text.facts(given, cost))


def array(*shape: int) -> PlacedArray:
    return PlacedArray(("x",), shape, "float32", 96, 0)


def test_a_title_contains_names_arrays_and_bytes() -> None:
    assert text.title(placement(), Cost(arrays=2, once=3400)) == "p, q: 2 arrays, 3.3 KiB"


@pytest.mark.parametrize(
    ("layouts", "line"),
    [
        ([(on(0), 500)], "500 B on 1 device"),
        ([(on(0, 1, 2), 500)], "500 B on each of 3 devices"),
        ([(on(0, 1), 500), (on(1), 100)], "500 B to 600 B on each of 2 devices"),
        ([(on(8), 7)], "7 B on 1 host memory"),
        ([(on(8, 9), 7)], "7 B on each of 2 host memories"),
    ],
)
def test_bytes_of_devices_are_summarized(layouts: list[tuple[Layout, int]], line: str) -> None:
    assert facts(placement(*layouts)) == [line]


def test_devices_and_host_memory_are_separate() -> None:
    assert facts(placement((on(0, 8), 7))) == ["7 B on 1 device", "7 B on 1 host memory"]
    assert facts(placement()) == []


def test_copies_are_counted() -> None:
    none = "300 B with copies: 200 B are copies, and none of them could be sharded"
    assert facts(placement(), Cost(1, 100, 300, 0)) == [none]
    some = "300 B with copies: 200 B are copies, and 50 B of them could be sharded"
    assert facts(placement(), Cost(1, 100, 300, 50)) == [some]
    assert facts(placement(), Cost(1, 100, 100, 0)) == []


def test_many_notes_are_truncated() -> None:
    notes = tuple(f"note {number}" for number in range(14))
    assert facts(placement(notes=notes[:12])) == list(notes[:12])
    assert facts(placement(notes=notes)) == [*notes[:12], "and 2 more notes"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 2), "mesh data 4 x model 2: data crosses ranks, model stays on a rank"),
        ((2, 4), "mesh data 2 x model 4: data crosses ranks, model crosses ranks"),
        ((1, 2), "mesh data 1 x model 2: model stays on a rank"),
        ((1, 1), "mesh data 1 x model 1"),
    ],
)
def test_a_mesh_axis_crosses_ranks_or_stays(sizes: tuple[int, int], words: str) -> None:
    devices = tuple(range(sizes[0] * sizes[1]))
    mesh = MeshShape(axes=("data", "model"), sizes=sizes, devices=devices)
    assert text.mesh_words(placement(), mesh) == words
    assert facts(placement(meshes=(mesh,))) == [words]


def test_the_order_of_devices_in_a_mesh_counts() -> None:
    mesh = MeshShape(axes=("data", "model"), sizes=(2, 2), devices=(0, 2, 1, 3))
    words = "mesh data 2 x model 2: data stays on a rank, model crosses ranks"
    assert text.mesh_words(placement(), mesh) == words
    empty = MeshShape(axes=(), sizes=(), devices=(0,))
    assert text.mesh_words(placement(), empty) == "mesh without axes"


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([2], "1@a gpu:0"),
        ([0, 1], "0@a gpu:0, gpu:1"),
        ([0, 1, 2, 3], "0-1@a gpu:0, gpu:1"),
        ([3, 1], "0-1@a gpu:1"),
        ([0, 2, 4], "0-2 gpu:0"),
        ([0, 3], "0@a gpu:0, 1@a gpu:1"),
        ([0, 1, 2], "0@a gpu:0, 0@a gpu:1, 1@a gpu:0"),
        ([0, 1, 2, 4, 6], "0@a gpu:0, 0@a gpu:1, 1@a gpu:0, 2@b gpu:0 and 1 more"),
    ],
)
def test_equal_devices_of_ranks_are_grouped(indices: list[int], words: str) -> None:
    assert text.devices(placement(), indices) == words


def test_many_devices_of_one_rank_are_not_all_named() -> None:
    given = Placement(
        names=(),
        hosts={0: "a"},
        devices=tuple(PlacedDevice(0, f"cpu:{number}") for number in range(5)),
        meshes=(),
        layouts=(),
        arrays=(),
    )
    assert text.devices(given, range(4)) == "0@a cpu:0, cpu:1, cpu:2, cpu:3"
    named = "0@a cpu:0, 0@a cpu:1, 0@a cpu:2, 0@a cpu:3 and 1 more"
    assert text.devices(given, range(5)) == named


def test_devices_of_a_plan_have_numbers() -> None:
    plan = placement(hosts={})
    assert text.devices(plan, [3]) == "device 3"
    assert text.devices(plan, [0, 1, 3]) == "devices 0-1,3"
    assert text.devices(plan, range(0, 60, 2)).endswith("…")


def test_a_long_path_keeps_its_ends() -> None:
    assert text.label("x" * 60, ()) == "x" * 60
    assert text.label("a" * 31 + "b" * 30, ()) == "a" * 30 + "…" + "b" * 30
    assert text.label("w", (0, 1, 3)) == "w (rank 0-1,3)"


def test_the_sharding_is_a_spec_or_a_word() -> None:
    assert text.how(Layout(kind="sharded", spec="P('data')")) == "P('data')"
    assert text.how(Layout(kind="sharded")) == "sharded"
    assert text.how(Layout(kind="replicated", spec="P()")) == "replicated"
    assert text.how(Layout(kind="one device", owners=2)) == "one device, own on each rank"
    assert text.how(Layout(kind="per replica", owners=2)) == "per replica"


def test_parts_and_copies_are_counted() -> None:
    assert text.partitioned(on(*range(6), parts=(3, 2))) == "3 x 2"
    assert text.partitioned(on(*range(6), parts=(3, 1))) == "3 x 1, 2 copies"
    assert text.partitioned(on(*range(6))) == "6 copies"
    assert text.partitioned(on(0, parts=(1, 1))) == ""


def test_figures_of_an_array() -> None:
    assert text.shape(array(2, 3)) == "2 x 3"
    assert text.shape(array()) == "scalar"
    assert text.per_device(array(8), on(0, 1, parts=(2,))) == "48 B"
    assert text.per_device(array(8), Layout(kind="deleted")) == ""
    assert text.advice(array(3, 4), on(0, 1), Cost(shardable=48)) == "48 B, dim 1"
    assert text.advice(array(3, 3), on(0, 1), Cost()) == ""


def test_sharded_dimensions_name_their_axes() -> None:
    layout = Layout(kind="sharded", parts=(3, 1, 4), axes=(("data",), (), ("model", "seq")))
    assert text.over_axes(layout) == "dim 0 in 3 over data, dim 2 in 4 over model x seq"
    assert text.over_axes(Layout(kind="sharded", parts=(1, 2))) == "dim 1 in 2"
    assert text.over_axes(Layout(kind="replicated")) == ""


@pytest.mark.parametrize(
    ("shape", "parts", "number", "words"),
    [
        ((), (), 0, "all"),
        ((6,), (), 0, "all"),
        ((6,), (3,), 1, "2:4"),
        ((7,), (2,), 1, "3:7"),
        ((6, 4), (3, 1), 2, "rows 4:6, cols all"),
        ((6, 4), (3, 2), 3, "rows 2:4, cols 2:4"),
        ((6, 4), (), 0, "rows all, cols all"),
        ((2, 3, 8), (1, 1, 2), 1, "[:, :, 4:8]"),
        ((4, 3, 8), (2, 1, 2), 2, "[2:4, :, 0:4]"),
    ],
)
def test_a_block_is_a_slice(
    shape: tuple[int, ...], parts: tuple[int, ...], number: int, words: str
) -> None:
    assert text.block(array(*shape), Layout(kind="sharded", parts=parts), number) == words
