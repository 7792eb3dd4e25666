"""Meshes have the requested sizes, and the axes with most traffic use the fastest links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given

import nbdist
from nbdist.errors import UsageError
from nbdist.parallel.placement.named_layouts import named

NAMES = ("data", "fsdp", "model", "stage", "other")


@dataclass(frozen=True)
class Tpu:
    """Attributes of a TPU that `jax.experimental.mesh_utils` reads. Tests have no real TPU."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


def slices(count: int, side: int = 4) -> list[Any]:
    """Return devices of `count` v5e slices with `side` x `side` devices each."""
    return [
        Tpu(number, (number % side, number // side % side, 0), number // 4, number // side**2)
        for number in range(count * side**2)
    ]


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), st.integers(0, 3))
def test_a_mesh_has_the_requested_sizes(sizes: list[int], open_axis: int) -> None:
    axes = dict(zip(NAMES, sizes, strict=False))
    given_ones = math.prod(sizes)
    if open_axis < len(sizes):
        given_ones //= sizes[open_axis]
        axes[NAMES[open_axis]] = -1
    fits = 8 % given_ones == 0 if -1 in axes.values() else given_ones == 8
    if not fits:
        with pytest.raises(UsageError, match="does not multiply out to 8 devices"):
            nbdist.meshes(axes)
        return
    mesh = nbdist.meshes(axes)
    assert tuple(mesh.axis_names) == tuple(axes)
    assert all(size in {-1, mesh.shape[name]} for name, size in axes.items())
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_the_model_axis_is_innermost_in_any_order() -> None:
    first = nbdist.meshes({"data": 4, "model": 2})
    second = nbdist.meshes({"model": 2, "data": 4})
    np.testing.assert_array_equal(first.devices, second.devices.T)
    assert [device.id for device in first.devices[0]] == [0, 1]
    pipelined = nbdist.meshes({"model": 2, "stage": 2, "data": 2})
    assert [device.id for device in pipelined.devices[:, 0, 0]] == [0, 1]
    assert [device.id for device in pipelined.devices[0, 0, :]] == [0, 2]
    assert [device.id for device in pipelined.devices[0, :, 0]] == [0, 4]


def test_a_mesh_may_use_some_devices() -> None:
    some = jax.devices()[2:6]
    mesh = nbdist.meshes({"data": -1}, devices=some)
    assert list(mesh.devices) == some


def test_neighbours_on_a_torus_are_neighbours_on_an_axis() -> None:
    mesh = nbdist.meshes({"data": 4, "model": 4}, devices=slices(1))
    for along in (mesh.devices, mesh.devices.T):
        for row in along:
            steps = [np.subtract(a.coords, b.coords) for a, b in pairwise(row)]
            assert all(np.abs(step).sum() == 1 for step in steps)


def test_only_the_outermost_axis_crosses_slices() -> None:
    mesh = nbdist.meshes({"model": 4, "data": -1}, devices=slices(2))
    assert mesh.shape == {"model": 4, "data": 8}
    for replica in mesh.devices.T:
        assert len({device.slice_index for device in replica}) == 1
    assert {device.slice_index for device in mesh.devices[0]} == {0, 1}


def test_an_inner_axis_crosses_slices_if_the_outer_cannot() -> None:
    mesh = nbdist.meshes({"data": 16, "model": 3}, devices=slices(3))
    assert [device.slice_index for device in mesh.devices[0]] == [0, 1, 2]


def test_where_reports_the_links_of_each_axis() -> None:
    found = nbdist.where(nbdist.meshes({"data": -1, "model": 2}))
    assert found.axes["model"].startswith("(2): inside each process")
    assert found.grid.splitlines()[0] == "cpu:0 cpu:1"
    assert "<table" in found._repr_mimebundle_()["text/html"]
    alone = nbdist.where(nbdist.meshes({"data": 1}, devices=jax.devices()[:1]))
    assert alone.axes["data"].startswith("(1): one device: nothing is sent")
    assert found.axes["model"].endswith("sends in each layer: innermost")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "needs names and sizes"),
        (8, "needs names and sizes"),
        ({3: 8}, "axis 3 is not a name"),
        ({"data": -1, "model": -1}, "'data' and 'model' are both -1"),
        ({"data": 0, "model": 2.0}, "axis 'data' has size 0.*axis 'model' has size 2.0"),
        ({"data": 3}, "data 3 does not multiply out to 8 devices: .* 1, 2, 4, 8"),
        ({"data": -1, "model": 5}, "does not multiply out"),
    ],
)
def test_invalid_sizes_are_refused(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nbdist.meshes(axes)


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "there are none"), (["cpu:0"], "is not a device"), ([0, 0], "is not")],
)
def test_invalid_devices_are_refused(devices: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nbdist.meshes({"data": -1}, devices=devices)
    twice = [jax.devices()[0]] * 2
    with pytest.raises(UsageError, match="is listed 2 times"):
        nbdist.meshes({"data": -1}, devices=twice)


@pytest.mark.parametrize(
    ("axes", "layout", "spec"),
    [
        ({"DATA": 4, "Model": 2}, "model", (None, "Model")),
        ({"DATA": 4, "Model": 2}, "batch", ("DATA",)),
        ({"stage": 2, "data": 4}, "batch", ("data",)),
        ({"stage": 2, "data": 4}, "model", (None, "data")),
        ({"stage": 2, "data": 2, "model": 2}, "full", ("data", "model")),
        ({"fsdp": 4, "tp": 2}, "full", ("fsdp", "tp")),
        ({"x": 4, "y": 2}, "full", ("x", "y")),
    ],
)
def test_layouts_find_axes_by_name(axes: Any, layout: str, spec: Any) -> None:
    sharding = named(layout, (8, 8), nbdist.meshes(axes))
    assert tuple(sharding.spec) == spec


def test_a_layout_without_a_model_axis_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'data', 'fsdp', and none is for the model: name one"):
        named("model", (8, 8), nbdist.meshes({"data": 2, "fsdp": 4}))
