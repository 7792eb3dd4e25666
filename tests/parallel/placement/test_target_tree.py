"""Tuples as `PartitionSpec`, with errors in the terms of the call."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import nbdist
from nbdist.errors import UsageError


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return nbdist.meshes({"data": 4, "model": 2})


@pytest.mark.parametrize(
    "spec", [("data", "model"), ("data",), (None, "model"), (("data", "model"), None), ()]
)
def test_a_tuple_is_a_spec(mesh: jax.sharding.Mesh, spec: Any) -> None:
    placed = nbdist.place(np.ones((8, 8), np.float32), spec, mesh=mesh)
    assert placed.sharding.spec == PartitionSpec(*spec)
    assert nbdist.where(placed) == spec
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda x: nbdist.place(x, spec))(np.ones((8, 8), np.float32))
    assert nbdist.where(traced) == spec


def test_a_tuple_is_a_spec_for_each_leaf_of_a_tree(mesh: jax.sharding.Mesh) -> None:
    tree = {"w": np.ones((8, 8)), "layers": [np.ones((4, 2)), np.ones((8, 4))]}
    placed = nbdist.place(tree, ("data", "model"), mesh=mesh)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(placed)} == {
        PartitionSpec("data", "model")
    }


def test_a_tree_of_places_may_contain_tuples(mesh: jax.sharding.Mesh) -> None:
    tree = {"w": np.ones((8, 8)), "b": np.ones(8), "pair": (np.ones((4, 4)), np.ones(2))}
    places = {"w": ("data", "model"), "b": (None,), "pair": (("data", "model"), "replicated")}
    placed = nbdist.place(tree, places, mesh=mesh)
    assert placed["w"].sharding.spec == PartitionSpec("data", "model")
    assert placed["pair"][0].sharding.spec == PartitionSpec("data", "model")
    assert placed["pair"][1].sharding.is_fully_replicated
    assert nbdist.where(placed) == places


def test_a_tuple_of_places_for_a_tuple_stays_a_tree(mesh: jax.sharding.Mesh) -> None:
    first, second = nbdist.place((np.ones((8, 8)), np.ones(8)), ("model", "batch"), mesh=mesh)
    assert first.sharding.spec == PartitionSpec(None, "model")
    assert second.sharding.spec == PartitionSpec("data")
    devices = jax.devices()[1:3]
    moved = nbdist.place((np.ones(2), np.ones(2)), tuple(devices))
    assert [array.devices() for array in moved] == [{device} for device in devices]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ("data", "modle"),
            r"\('data', 'modle'\): the mesh has no axis 'modle' \(did you mean 'model'\?\)",
        ),
        (("data", "data"), "the spec has axis 'data' 2 times"),
        (
            (("data", 2),),
            r"where=\(\('data', 2\),\): entry 0 is a tuple: use an axis name, a tuple",
        ),
        (("data", 2), r"where=\('data', 2\): entry 1 is an int: use an axis name, a tuple of "),
        (
            (jax.devices()[0], None),
            "entry 0 is a Device: use an axis name, a tuple of axis names, or None",
        ),
        (
            ("data", None, "model"),
            r"\['w'\] \[6, 8\]: the spec has 3 entries, and the array has 2 dimensions",
        ),
        (
            ("data",),
            r"\['w'\] \[6, 8\]: dimension 0 has 6 elements, and mesh axis 'data' divides it by 4",
        ),
        (
            ("data",),
            "divides it by 4: use 4 or 8 elements, or None for this dimension",
        ),
        ((("model", "data"),), "mesh axes 'model' and 'data' divide it by 8"),
    ],
)
def test_an_invalid_spec_is_refused(mesh: jax.sharding.Mesh, spec: Any, message: str) -> None:
    tree = {"w": np.ones((6, 8))}
    with pytest.raises(UsageError, match=message):
        nbdist.place(tree, spec, mesh=mesh)
    with pytest.raises(UsageError, match=message), jax.set_mesh(mesh):
        jax.jit(lambda tree: nbdist.place(tree, spec))(tree)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"w": "full"}, r"where has no place for tree\['layers'\]"),
        (
            {"w": "full", "layers": ["full"]},
            r"where has no place for tree\['layers'\]\[1\]",
        ),
        (
            {"w": "full", "layers": "full", "bias": "full"},
            r"where\['bias'\] has no counterpart: tree has \['layers'\], \['w'\]",
        ),
        (
            {"w": {"kernel": "full"}, "layers": "full"},
            r"where\['w'\] is a dict, and tree\['w'\] is one array: give one place",
        ),
        ({"w": "full", "layers": None}, r"where\['layers'\] is None: give a place"),
        (
            {"w": "full", "layers": ("replicated", "batch")},
            "no axis 'replicated', 'batch': .*a tuple is a PartitionSpec: use a list for a place ",
        ),
    ],
)
def test_an_invalid_tree_of_places_is_refused(
    mesh: jax.sharding.Mesh, places: Any, message: str
) -> None:
    tree = {"w": np.ones((8, 8)), "layers": [np.ones((8, 8)), np.ones((8, 8))]}
    with pytest.raises(UsageError, match=message) as raised:
        nbdist.place(tree, places, mesh=mesh)
    assert "pytree" not in str(raised.value)


def test_parts_without_arrays_need_no_place(mesh: jax.sharding.Mesh) -> None:
    tree = {"w": np.ones((8, 8)), "none": None, "empty": {}}
    assert nbdist.place(tree, {"w": "full"}, mesh=mesh)["none"] is None
    assert nbdist.place(tree, {"w": "full", "none": None, "empty": {}}, mesh=mesh)["empty"] == {}
