"""Placement of arrays, merged from made-up reports of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist.errors import TransferError, UsageError
from nbdist.records import (
    OWN_RANK,
    Layout,
    MeshShape,
    PlacedArray,
    PlacedDevice,
    Placement,
    PlacementReport,
)
from nbdist.session.placement import locate, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OWN = PlacedDevice(OWN_RANK, "cpu:0")
LOCAL = Layout(kind="one device", devices=(0,), blocks=(0,))


def array(name: str, shape: tuple[int, ...] = (2,), layout: int = 0) -> PlacedArray:
    return PlacedArray((name,), shape, "float32", 8, layout)


def report(*arrays: PlacedArray, **changes: Any) -> PlacementReport:
    """Return the report of ranks that have the arrays on their own CPU."""
    usual = PlacementReport(devices=(OWN,), meshes=(), layouts=(LOCAL,), arrays=arrays)
    return msgspec.structs.replace(usual, **changes)


def merged(reports: dict[tuple[int, ...], PlacementReport], *names: str) -> Placement:
    ranks = [rank for key in reports for rank in key]
    return merge(names, reports, dict.fromkeys(ranks, "host"))


def devices_of(placement: Placement, index: int = 0) -> list[tuple[int, str]]:
    """Return rank and name of the devices that hold an array."""
    layout = placement.layouts[placement.arrays[index].layout]
    return [(placement.devices[d].rank, placement.devices[d].name) for d in layout.devices]


# Requests.


def asking(reports: Sequence[PlacementReport]) -> Callable[..., list[bytes]]:
    """Return a function that answers for each rank as the ranks do."""

    def ask(_function: object, _names: object, ranks: Sequence[int]) -> list[bytes]:
        return [msgspec.msgpack.encode(reports[rank]) for rank in ranks]

    return ask


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ((), "no name given"),
        (("",), "invalid name: ''"),
        (("w", "a b", "p['w']", "m..w"), "invalid name: 'a b', \"p['w']\", 'm..w'"),
    ],
)
def test_invalid_names_are_refused_before_ranks_are_asked(
    names: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(UsageError) as error:
        locate(names, asking([]), {0: "host"})
    assert str(error.value) == f"{fault}: type names as in %dist_show params model.optimizer"


def test_ranks_with_equal_reports_are_one_group() -> None:
    reports = [report(array("w")), report(array("w"), notes=("differs",)), report(array("w"))]
    hosts = {2: "c", 0: "a", 1: "b"}
    placement = locate(["w", "model.w"], asking(reports), hosts).placement
    assert (placement.names, placement.hosts) == (("w", "model.w"), hosts)
    assert devices_of(placement) == [(0, "cpu:0"), (1, "cpu:0"), (2, "cpu:0")]
    assert placement.notes == ("differs",)
    equal = locate(["w"], asking(reports[:1] * 3), hosts).placement
    assert devices_of(equal) == [(0, "cpu:0"), (1, "cpu:0"), (2, "cpu:0")]


def test_a_name_that_exists_nowhere_is_refused() -> None:
    nowhere = report(missing=("x", "y"))
    somewhere = report(array("y"), missing=("x",))
    with pytest.raises(TransferError, match=r"^no such name on the workers: x; define it in a %%"):
        merged({(0,): nowhere, (1,): somewhere}, "x", "y")


def test_a_name_without_an_array_is_refused_with_its_type() -> None:
    reports = {(0,): report(empty={"n": "int"}), (1,): report(missing=("n",))}
    with pytest.raises(UsageError, match=r"^no arrays in `n` \(int\): name an array, a variable"):
        merged(reports, "n")


# Equal layouts.


def test_equal_arrays_are_listed_once_with_the_devices_of_all_ranks() -> None:
    placement = merged({(0, 2): report(array("w")), (1,): report(array("w"))}, "w")
    assert placement.arrays == (array("w"),)
    assert devices_of(placement) == [(0, "cpu:0"), (1, "cpu:0"), (2, "cpu:0")]
    assert placement.layouts[0].owners == 3
    assert placement.notes == ()


def test_a_mirrored_array_has_one_owner() -> None:
    mirrored = msgspec.structs.replace(LOCAL, kind="mirrored")
    placement = merged({(0, 1): report(array("w"), layouts=(mirrored,))}, "w")
    assert placement.layouts[0].owners == 1
    assert len(devices_of(placement)) == 2


def test_a_global_array_has_each_device_once() -> None:
    devices = tuple(PlacedDevice(rank, "gpu:0") for rank in (0, 1))
    layout = Layout(kind="sharded", devices=(0, 1), blocks=(1, 0), parts=(2,))
    placement = merged({(0, 1): report(array("w"), devices=devices, layouts=(layout,))}, "w")
    assert devices_of(placement) == [(0, "gpu:0"), (1, "gpu:0")]
    assert (placement.layouts[0].blocks, placement.layouts[0].owners) == ((1, 0), 1)


def test_equal_layouts_share_an_entry() -> None:
    same = (LOCAL, LOCAL)
    arrays = array("a"), array("b", layout=1)
    placement = merged({(0, 1): report(*arrays, layouts=same)}, "a", "b")
    assert [one.layout for one in placement.arrays] == [0, 0]
    assert len(placement.layouts) == 1


@pytest.mark.parametrize(
    ("device", "on_mesh"),
    [(OWN, [(0, "cpu:0")]), (PlacedDevice(1, "gpu:0"), [(1, "gpu:0")])],
)
def test_a_mesh_has_the_devices_of_the_first_rank(
    device: PlacedDevice, on_mesh: list[tuple[int, str]]
) -> None:
    mesh = MeshShape(axes=("data",), sizes=(1,), devices=(0,))
    layout = msgspec.structs.replace(LOCAL, mesh=0)
    given = report(array("w"), devices=(device,), meshes=(mesh,), layouts=(layout,))
    placement = merged({(0, 1): given}, "w")
    (merged_mesh,) = placement.meshes
    devices = [placement.devices[number] for number in merged_mesh.devices]
    assert [(one.rank, one.name) for one in devices] == on_mesh
    assert placement.layouts[placement.arrays[0].layout].mesh == 0


# Differences between ranks.


def test_different_shapes_are_listed_by_ranks() -> None:
    reports = {(0, 2): report(array("w")), (1,): report(array("w", shape=(3,)))}
    placement = merged(reports, "w")
    assert [(one.shape, one.ranks) for one in placement.arrays] == [((2,), (0, 2)), ((3,), (1,))]
    (note,) = placement.notes
    assert note == (
        "ranks differ in w: float32 of shape (2,), one device, on ranks 0,2, "
        "float32 of shape (3,), one device, on rank 1"
    )


def test_an_array_that_some_ranks_lack_is_reported() -> None:
    reports = {(0, 1): report(array("w")), (2, 3): report(array("w"), array("b"))}
    placement = merged(reports, "w")
    assert [(one.name, one.ranks) for one in placement.arrays] == [("w", ()), ("b", (2, 3))]
    assert placement.notes == (
        "ranks differ in b: float32 of shape (2,), one device, on ranks 2-3, not on ranks 0-1",
    )


def test_different_layouts_are_described_by_their_spec() -> None:
    other = msgspec.structs.replace(LOCAL, spec="P('data')", kind="sharded")
    reports = {(0,): report(array("w")), (1,): report(array("w"), layouts=(other,))}
    (note,) = merged(reports, "w").notes
    assert note.endswith("(2,), one device, on rank 0, float32 of shape (2,), P('data'), on rank 1")


def test_a_missing_name_is_reported_once_and_not_for_its_arrays() -> None:
    reports = {
        (0,): report(array("w")),
        (1, 2): report(missing=("w",)),
        (3,): report(empty={"w": "int"}),
    }
    assert merged(reports, "w").notes == (
        "w does not exist on ranks 1-2",
        "w has type int on rank 3",
    )


def test_only_some_differences_are_listed() -> None:
    names = [f"w{number}" for number in range(7)]
    reports = {(0,): report(*map(array, names)), (1,): report(array("x"), notes=("last",))}
    notes = merged(reports, "params").notes
    assert [note.split(":")[0] for note in notes[:5]] == [
        f"ranks differ in {name}" for name in names[:5]
    ]
    assert notes[5:] == ("ranks differ in 3 more arrays", "last")


def test_equal_notes_of_ranks_are_shown_once() -> None:
    reports = {
        (0,): report(array("w"), notes=("a", "b")),
        (1,): report(array("w"), notes=("b", "c")),
    }
    assert merged(reports, "w").notes == ("a", "b", "c")
