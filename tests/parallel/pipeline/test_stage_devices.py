"""Devices of stages: equal parts, given places, and the shardings of parameters and rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import nbdist
from nbdist.errors import UsageError
from nbdist.parallel.pipeline.stage_devices import StagePlace, stage_places_of


def stage(own: Any, x: Any) -> Any:
    return own * x


def numbers(count: int) -> list[list[int]]:
    """Return the devices of stages without given places."""
    places = stage_places_of([stage] * count, None)
    return [sorted(device.id for device in place.devices) for place in places]


def test_stages_share_devices_equally() -> None:
    assert numbers(1) == [list(range(8))]
    assert numbers(2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numbers(3) == [[0, 1], [2, 3], [4, 5]]
    assert numbers(8) == [[n] for n in range(8)]
    assert numbers(16) == [[n // 2] for n in range(16)]
    assert numbers(9) == [[0], [0], [1], [2], [3], [4], [5], [6], [7]]


class Multiply:
    """A function without a name."""

    def __call__(self, own: Any, x: Any) -> Any:
        return own * x


def test_stage_has_a_title() -> None:
    first, second = stage_places_of(
        [stage, Multiply()], [jax.devices()[1], nbdist.meshes({"a": 8})]
    )
    assert (first.where, first.title) == ("cpu:1", "stage 0 (stage, on cpu:1)")
    assert second.title == "stage 1 (Multiply, on cpu:0, ..., cpu:7)"
    assert second.devices == set(jax.devices())


@pytest.mark.parametrize(
    ("places", "faults"),
    [
        (
            [jax.devices()[0]],
            ["devices has 1 entries for 2 stages: give one for each, or omit it"],
        ),
        (
            ["cpu:0", 1, jax.devices()[0]],
            [
                "devices has 3 entries for 2 stages: give one for each, or omit it",
                (
                    "devices[0]='cpu:0' has type str: give a jax.Device, or a jax.sharding."
                    "Mesh of several"
                ),
                "devices[1]=1 has type int: give a jax.Device, or a jax.sharding.Mesh of several",
            ],
        ),
        (
            nbdist.meshes({"a": 8}),
            ["devices is one Mesh: give a list with an entry for each stage"],
        ),
    ],
    ids=["too few", "no devices", "one mesh"],
)
def test_every_wrong_place_is_listed(places: Any, faults: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        stage_places_of([stage, stage], places)
    assert str(raised.value).split("; ") == faults


def test_one_device_is_no_list() -> None:
    with pytest.raises(
        UsageError, match=r"^devices is one .*Device: give a list with an entry for"
    ):
        stage_places_of([stage], jax.devices()[0])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> StagePlace:
    return StagePlace(0, "stage", nbdist.meshes({"data": 4, "model": 2}))


def test_parameters_keep_a_sharding_over_their_mesh(whole: StagePlace) -> None:
    own = NamedSharding(whole.mesh, PartitionSpec("model"))
    assert whole.of_params(jax.device_put(np.ones(4), own)) == own
    replicated = NamedSharding(whole.mesh, PartitionSpec())
    other = NamedSharding(nbdist.meshes({"other": 8}), PartitionSpec("other"))
    for leaf in (np.ones(4), jnp.ones(4), jax.device_put(np.ones(8), other)):
        assert whole.of_params(leaf) == replicated


@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 3), ("data",)), ((4,), ("data",)), ((6, 4), ()), ((), ())]
)
def test_rows_are_over_the_first_axis_if_they_divide(
    whole: StagePlace, shape: tuple[int, ...], spec: tuple[str, ...]
) -> None:
    assert whole.of_rows(np.ones(shape)) == NamedSharding(whole.mesh, PartitionSpec(*spec))


def test_mesh_of_one_device_needs_no_spec() -> None:
    (place,) = stage_places_of([stage], [jax.devices()[3]])
    expected = SingleDeviceSharding(jax.devices()[3])
    assert place.of_rows(np.ones((8, 3))) == place.of_params(np.ones(3)) == expected
