"""Arrays saved on the host and restored, here on the same devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.jax.rebuild.arrays import Devices, SavedArray
from nbdist.worker.jax.rebuild.walk import LostValue


def restored(array: jax.Array) -> jax.Array:
    saved = SavedArray.of(array)
    return saved.made(Devices())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.ones((0, 3), "int8"),
        jnp.ones(3, jnp.bfloat16),
        jnp.asarray(3),
        np.array([True, False]),
    ],
)
@pytest.mark.parametrize("committed", [True, False])
def test_array_keeps_its_values_and_type(array: Any, committed: bool) -> None:
    old = jax.device_put(array, jax.devices()[0]) if committed else jnp.asarray(array)
    new = restored(old)
    assert new is not old
    np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
    assert (new.dtype, new.shape, new.sharding) == (old.dtype, old.shape, old.sharding)
    assert (new.weak_type, new.committed) == (old.weak_type, old.committed)


def test_random_key_keeps_its_data_and_kind() -> None:
    old = jax.random.key(5, impl="rbg")
    new = restored(old)
    assert new.dtype == old.dtype
    np.testing.assert_array_equal(jax.random.key_data(new), jax.random.key_data(old))


def test_wide_array_stays_wide() -> None:
    with jax.enable_x64(True):
        old = jax.device_put(np.array([1 + 2**40]), jax.devices()[0])
    new = restored(old)
    assert (new.dtype, int(np.asarray(new)[0])) == (np.int64, 1 + 2**40)


def test_deleted_array_is_lost() -> None:
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(LostValue):
        SavedArray.of(array)


def test_saved_values_are_copies() -> None:
    """A view of a CPU array would end with its backend."""
    ((_, values),) = SavedArray.of(jnp.arange(4)).shards
    assert values.base is None
    assert values.flags.owndata


def test_places_are_those_of_the_same_devices() -> None:
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([[device]]), ("data", "model"))
    devices = Devices()
    for place in (
        device,
        mesh,
        mesh.abstract_mesh,
        jax.NamedSharding(mesh, jax.P("data")),
        jax.sharding.SingleDeviceSharding(device),
    ):
        assert devices.renewed(place) == place


def test_unknown_places_are_lost() -> None:
    devices = Devices()
    with pytest.raises(LostValue):
        devices.renewed("cpu")
    devices._devices.clear()
    with pytest.raises(LostValue):
        devices.renewed(jax.devices()[0])
