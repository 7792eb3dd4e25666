"""Tensors of a plan as a placement, and as a tree with folded layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.records import PlannedTensor
from nbdist.views.placement.tree import Branch, Leaf
from nbdist.views.plan.tensors import folded, largest, placement_of, segments, written
from tests.plans import by_hand, tensor

if TYPE_CHECKING:
    from nbdist.records import Spec


def labels(*tensors: PlannedTensor) -> list[object]:
    """Return the labels of the folded tree, without those of roles."""
    plan = by_hand(*tensors)
    root = folded(plan, placement_of(plan))
    return [label for entry in root.entries for label in _inner(entry)]


def _inner(entry: Branch | Leaf) -> list[object]:
    assert isinstance(entry, Branch)
    return [
        inner.label if isinstance(inner, Leaf) else (inner.label, *_inner(inner))
        for inner in entry.entries
    ]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("w", ("w",)),
        ("p['a'][0].kernel", ("p", "['a']", "[0]", ".kernel")),
        ('p["it\'s"]', ("p", '["it\'s"]')),
        ("p['a]b'].c", ("p", "['a]b']", ".c")),
        (r"p['\'']", ("p", r"['\'']")),
        ("", ("",)),
    ],
)
def test_a_path_is_split_at_keys_and_attributes(path: str, parts: tuple[str, ...]) -> None:
    assert segments(path) == parts


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ((), "P()"),
        (((), ()), "P()"),
        ((("data",), ()), "P('data')"),
        (((), ("model",)), "P(None, 'model')"),
        ((("model", "data"), (), ("stage",)), "P(('model', 'data'), None, 'stage')"),
    ],
)
def test_a_spec_is_written_as_code(spec: Spec, code: str) -> None:
    assert written(spec) == code


def test_blocks_follow_the_order_of_mesh_and_spec() -> None:
    plan = by_hand(
        tensor("a", 8, first="data"),
        tensor("b", 8, first="model"),
        tensor("c", 8),
        data=2,
        model=3,
    )
    a, b, c = placement_of(plan).layouts
    assert a.blocks == (0, 0, 0, 1, 1, 1)
    assert b.blocks == (0, 1, 2, 0, 1, 2)
    assert (c.blocks, c.kind, a.kind) == ((0,) * 6, "replicated", "sharded")


def test_a_dimension_over_two_axes_has_the_first_one_outermost() -> None:
    def planned(path: str, *spec: tuple[str, ...]) -> PlannedTensor:
        return PlannedTensor(path, "parameter", (12, 8), "float32", spec, 64)

    tensors = planned("d", ("model", "data"), ()), planned("e", ("data",), ("model",))
    d, e = placement_of(by_hand(*tensors, data=2, model=3)).layouts
    assert (d.parts, d.blocks) == ((6, 1), (0, 2, 4, 1, 3, 5))
    assert (e.parts, e.blocks) == ((2, 3), (0, 1, 2, 3, 4, 5))


def test_arrays_of_one_spec_share_a_layout() -> None:
    plan = by_hand(tensor("a", 8), tensor("b", 4, 4), tensor("c", 4))
    found = placement_of(plan)
    assert [array.layout for array in found.arrays] == [0, 1, 0]
    assert found.meshes[0].sizes == (2, 2)


def test_bytes_of_an_array_are_those_of_all_its_blocks() -> None:
    plan = by_hand(tensor("a", 8, 4, first="data"), tensor("b", 8, 4))
    assert [array.nbytes for array in placement_of(plan).arrays] == [128, 128]


def test_roles_are_branches_in_their_order() -> None:
    plan = by_hand(
        tensor("x", 4, role="batch"),
        tensor("r", 4, role="read"),
        tensor("w", 4),
        tensor("m", 4, role="state"),
    )
    root = folded(plan, placement_of(plan))
    assert [entry.label for entry in root.entries] == [
        "parameters",
        "optimizer state",
        "read only",
        "batch",
    ]
    assert (root.cost.arrays, root.cost.stored) == (4, 4 * 16 * 4)


def test_equal_layers_are_one_entry() -> None:
    layers = [tensor(f"p['layers'][{i}]['w']", 4) for i in range(3)]
    assert labels(*layers, tensor("p['b']", 4)) == [("p", ("['layers'][#] x 3", "['w']"), "['b']")]
    plan = by_hand(*layers)
    assert folded(plan, placement_of(plan)).cost.arrays == 3


def test_arrays_of_a_list_are_one_entry() -> None:
    assert labels(*(tensor(f"p[{i}]", 4) for i in range(2))) == [("p", "[#]")]


def test_four_names_with_a_number_are_layers() -> None:
    assert labels(*(tensor(f"p['w{i}']", 4) for i in range(3))) == [
        ("p", "['w0']", "['w1']", "['w2']")
    ]
    assert labels(*(tensor(f"p['w{i}']", 4) for i in range(4))) == [("p", "['w#']")]


def test_layers_that_differ_keep_their_numbers() -> None:
    shapes = [4, 4, 8, 8, 4]
    layers = [tensor(f"p[{i}]['w']", size) for i, size in enumerate(shapes)]
    assert labels(*layers) == [("p", ("[2-3] x 2", "['w']"), ("[0-1,4] x 3", "['w']"))]


def test_equal_branches_are_listed_by_name() -> None:
    moments = [tensor(f"{name}['w']", 4, role="state") for name in "mv"]
    others = [tensor(f"{name}['b']", 4, role="state") for name in "mv"]
    assert labels(*moments, *others) == [("m, v", "['w']", "['b']")]
    many = [tensor(f"{name}{key}", 4) for name in "abcde" for key in ("['w']", "['b']")]
    assert labels(*many) == [("a, b, c and 2 more", "['w']", "['b']")]
    assert labels(*many[:6]) == [("a, b, c", "['w']", "['b']")]


def test_the_largest_entries_are_first() -> None:
    assert labels(tensor("a", 4), tensor("b", 16), tensor("c", 8)) == ["b", "c", "a"]


def test_the_specs_with_most_bytes_are_drawn_with_a_parameter() -> None:
    plan = by_hand(
        tensor("m", 64, first="data", role="state"),
        tensor("w", 8, first="data"),
        tensor("v", 16, first="data"),
        tensor("k", 8, 4, first="model"),
        tensor("whole", 1000),
    )
    placement = placement_of(plan)
    found = [(array.name, count) for array, count in largest(plan, placement, 5)]
    assert found == [("v", 3), ("k", 1)]
    assert [array.name for array, _ in largest(plan, placement, 1)] == ["v"]
