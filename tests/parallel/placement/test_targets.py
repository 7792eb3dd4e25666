"""Targets of a place: devices, platforms, hosts, layouts, specs and shardings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import nbdist
from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import leaves_of
from nbdist.parallel.placement.targets import (
    Given,
    Layout,
    OneOf,
    Sharded,
    Target,
    checked,
    is_there,
    names_place,
    spec_over,
    target_of,
)
from nbdist.worker.jax.runtime import platforms, processes

if TYPE_CHECKING:
    from nbdist.parallel.placement.leaves import Leaf


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return nbdist.meshes({"data": 4, "model": 2})


def leaf(value: Any) -> Leaf:
    ((found,), _) = leaves_of(value, "place")
    return found


def placed(value: Any, where: Any) -> Leaf:
    return leaf(jax.device_put(value, where))


def device(number: int) -> jax.Device:
    return jax.devices()[number]


def test_device_and_its_names_are_one_place() -> None:
    expected = Given(SingleDeviceSharding(device(3)))
    for where in (device(3), platforms.name_of(device(3)), str(device(3))):
        assert target_of(where, None) == expected


def test_shardings_and_specs_are_places(mesh: jax.sharding.Mesh) -> None:
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    assert target_of(sharding, None) == Given(sharding)
    assert target_of(PartitionSpec("data"), mesh) == Sharded(PartitionSpec("data"), mesh)
    assert target_of("batch", mesh) == Layout("batch", mesh)


def test_platform_and_host_are_one_of_their_devices() -> None:
    host = processes.hosts()[0]
    for where in ("cpu", host):
        target = target_of(where, None)
        assert isinstance(target, OneOf)
        assert list(target.devices) == jax.devices()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (3, r"^where=3 has type int, which is no place: use a device, a name \(auto, replicated, "),
        ("batsh", r"^unknown place where='batsh' \(did you mean 'batch'\?\): use one of auto, rep"),
        ("zzz", r"^unknown place where='zzz': use one of auto, .*; host "),
        ("cpu:8", r"^unknown place where='cpu:8' \(did you mean 'cpu:"),
    ],
)
def test_unknown_place_lists_known_ones(where: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        target_of(where, None)
    assert "platform cpu (cpu:0, ..., cpu:7)" in str(raised.value)


@pytest.mark.parametrize(
    ("word", "is_place"),
    [
        ("auto", True),
        ("full", True),
        ("cpu", True),
        ("cpu:0", True),
        (processes.hosts()[0], True),
        ("data", False),
        ("cpu:8", False),
        ("", False),
    ],
)
def test_words_name_places(word: str, is_place: bool) -> None:
    assert names_place(word) is is_place


def test_one_device_keeps_an_array_that_is_on_one_of_its_devices() -> None:
    several = OneOf(jax.devices()[2:4])
    assert several.sharding(placed(np.ones(2), device(3))) == SingleDeviceSharding(device(3))
    for other in (leaf(np.ones(2)), placed(np.ones(2), device(5))):
        assert several.sharding(other) == SingleDeviceSharding(device(2))
    spread = placed(np.ones(8), NamedSharding(nbdist.meshes({"a": 8}), PartitionSpec("a")))
    assert OneOf(jax.devices()).sharding(spread) == SingleDeviceSharding(device(0))


def test_target_holds_arrays_that_are_there(mesh: jax.sharding.Mesh) -> None:
    target = Given(SingleDeviceSharding(device(1)))
    assert target.holds(placed(np.ones(2), device(1)))
    assert not target.holds(placed(np.ones(2), device(2)))
    assert not target.holds(leaf(np.ones(2)))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    assert not Given(rows).holds(placed(np.ones(6), device(1)))  # it cannot be there
    same = NamedSharding(mesh, PartitionSpec("data", None))
    assert Given(rows).holds(placed(np.ones((8, 2)), same))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    assert not Given(rows).holds(placed(np.ones((8, 4)), columns))


@pytest.mark.parametrize("target", [Layout, Sharded])
def test_layout_without_mesh_is_over_the_mesh_of_the_array(
    mesh: jax.sharding.Mesh, target: type[Target]
) -> None:
    """The current mesh has another shape."""
    own = placed(np.ones((8, 2)), NamedSharding(mesh, PartitionSpec("data")))
    place: Any = "batch" if target is Layout else PartitionSpec("data")
    assert target(place, None).holds(own)  # type: ignore[call-arg]
    assert target(place, mesh).holds(own)  # type: ignore[call-arg]
    other = nbdist.meshes({"data": 8})
    assert not target(place, other).holds(own)  # type: ignore[call-arg]
    assert not target(place, None).holds(leaf(np.ones((8, 2))))  # type: ignore[call-arg]
    assert not target(place, None).holds(placed(np.ones((7, 2)), device(0)))  # type: ignore[call-arg]
    with jax.set_mesh(other):
        assert target(place, None).sharding(own).mesh == other  # type: ignore[attr-defined, call-arg]


def test_layout_error_names_the_leaf(mesh: jax.sharding.Mesh) -> None:
    ((only,), _) = leaves_of({"w": np.ones((6, 2))}, "place")
    with pytest.raises(UsageError, match=r"^\['w'\]: 'batch' shards dimension 0 of \[6, 2\]"):
        Layout("batch", mesh).sharding(only)
    with pytest.raises(UsageError, match=r"^the array: 'batch' shards"):
        Layout("batch", mesh).sharding(leaf(np.ones((6, 2))))


@pytest.mark.parametrize(
    ("shape", "spec", "faults"),
    [
        ((8, 2), ("data", "model"), ()),
        ((8, 3), ("data",), ()),
        ((8,), (("data", "model"),), ()),
        ((8, 3), (None, None), ()),
        (
            (8,),
            ("data", None),
            ("the spec has 2 entries, and the array has 1 dimension: use at m",),
        ),
        (
            (6, 3),
            ("data", "model"),
            (
                "dimension 0 has 6 elements, and mesh axis 'data' divides it by 4: use 4 or 8 ",
                "dimension 1 has 3 elements, and mesh axis 'model' divides it by 2: use 2 or 4 ",
            ),
        ),
        (
            (1, 3),
            ("data",),
            ("dimension 0 has 1 element, and mesh axis 'data' divides it by 4: use",),
        ),
        ((3,), ("data",), ("divides it by 4: use 4 elements, or None for this dimension",)),
        (
            (12,),
            (("data", "model"),),
            ("mesh axes 'data' and 'model' divide it by 8: use 8 or 16",),
        ),
    ],
    ids=str,
)
def test_each_entry_of_a_spec_that_does_not_fit_is_named(
    mesh: jax.sharding.Mesh, shape: tuple[int, ...], spec: Any, faults: tuple[str, ...]
) -> None:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = leaf(np.ones(shape))
    if not faults:
        assert checked(array, sharding) is sharding
        return
    with pytest.raises(UsageError) as raised:
        checked(array, sharding)
    message = str(raised.value)
    assert message.startswith(f"the array {list(shape)}: ")
    assert len(message.split("; ")) == len(faults)
    for fault in faults:
        assert fault in message


def test_abstract_mesh_has_no_devices(mesh: jax.sharding.Mesh) -> None:
    abstract = NamedSharding(mesh.abstract_mesh, PartitionSpec("data"))
    with pytest.raises(UsageError, match=r"is over an abstract mesh: use a mesh with devices$"):
        Given(abstract).sharding(leaf(np.ones(8)))


def test_spec_over_a_mesh(mesh: jax.sharding.Mesh) -> None:
    for spec in (PartitionSpec("data", None), PartitionSpec(("model", "data")), PartitionSpec()):
        assert spec_over(spec, mesh) == NamedSharding(mesh, spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            PartitionSpec("dat", "modle"),
            (
                r"^spec \('dat', 'modle'\): the mesh has no axis 'dat' \(did you mean 'data'\?\), "
                r"'modle' \(did you mean 'model'\?\): its axes are data \(4\), model \(2\)$"
            ),
        ),
        (
            PartitionSpec("data", ("model", "data")),
            r"the spec has axis 'data' 2 times: its axes are data \(4\), model \(2\)$",
        ),
        (PartitionSpec("cpu"), "has no axis 'cpu': .*; a tuple is a PartitionSpec: use a list for"),
        (
            PartitionSpec(PartitionSpec.UNCONSTRAINED),
            "specifies no sharding: use a PartitionSpec of axes and None",
        ),
    ],
)
def test_invalid_spec_is_refused(
    mesh: jax.sharding.Mesh, spec: PartitionSpec, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        spec_over(spec, mesh)


def test_array_is_there_if_each_part_is(mesh: jax.sharding.Mesh) -> None:
    first = SingleDeviceSharding(device(0))
    assert is_there(leaf(jnp.ones(2)), first)
    assert not is_there(leaf(np.ones(2)), first)
    replicated = NamedSharding(mesh, PartitionSpec())
    assert not is_there(leaf(jnp.ones(2)), replicated)
    assert is_there(placed(np.ones(2), replicated), NamedSharding(mesh, PartitionSpec(None)))
