"""JAX arrays saved on the host and restored on the devices of another backend, by device id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.backend import backends

from nbdist.private_api.jax import ArrayImpl
from nbdist.worker.jax.rebuild.walk import LostValue

if TYPE_CHECKING:
    from collections.abc import Iterable


class Devices:
    """Map from devices, meshes and shardings of the old backend to those of the new one."""

    def __init__(self) -> None:
        self._devices = {
            (device.platform, device.id): device
            for backend in backends()
            for device in jax.devices(backend)
        }

    def renewed(self, place: Any) -> Any:
        """Return the device, mesh or sharding that replaces an old one.

        Raises:
            LostValue: The device no longer exists, or the sharding is of an unsupported kind.
        """
        if isinstance(place, jax.Device):
            return self._device(place)
        if isinstance(place, jax.sharding.Mesh):
            return self._mesh(place)
        if isinstance(place, jax.NamedSharding):
            mesh = self.renewed(place.mesh)
            return jax.NamedSharding(mesh, place.spec, memory_kind=place.memory_kind)
        if isinstance(place, jax.sharding.SingleDeviceSharding):
            (device,) = place.device_set
            kind = place.memory_kind
            return jax.sharding.SingleDeviceSharding(self._device(device), memory_kind=kind)
        if isinstance(place, jax.sharding.AbstractMesh):
            return place
        raise LostValue

    def _device(self, old: jax.Device) -> jax.Device:
        if (old.platform, old.id) not in self._devices:
            raise LostValue
        return self._devices[old.platform, old.id]

    def _mesh(self, old: jax.sharding.Mesh) -> jax.sharding.Mesh:
        devices = np.empty(old.devices.shape, object)
        for index, device in np.ndenumerate(old.devices):
            devices[index] = self._device(device)
        return jax.sharding.Mesh(devices, old.axis_names, axis_types=old.axis_types)


@dataclass(frozen=True)
class SavedArray:
    """Array with its values on this process's devices.

    Attributes:
        array: The old array; its values are not read again.
        shards: Devices, each with its values on the host.
    """

    array: jax.Array
    shards: tuple[tuple[jax.Device, np.ndarray], ...]

    @classmethod
    def of(cls, array: jax.Array) -> SavedArray:
        """Save an array.

        Raises:
            LostValue: The values cannot be read.
        """
        try:
            return cls(array, tuple(_on_host(_numbers(array).addressable_shards)))
        except Exception as error:  # deleted, or any error of its computation
            raise LostValue from error

    def made(self, devices: Devices) -> jax.Array:
        """Restore the array on the new devices.

        Raises:
            LostValue: A device no longer exists.
        """
        old = _numbers(self.array)
        sharding = devices.renewed(old.sharding)
        with jax.enable_x64(True):  # otherwise JAX would narrow 64-bit dtypes
            alone = jax.sharding.SingleDeviceSharding
            memory = old.sharding.memory_kind
            pieces = [
                jax.device_put(values, alone(devices.renewed(device), memory_kind=memory))
                for device, values in self.shards
            ]
            new = jax.make_array_from_single_device_arrays(
                old.shape, sharding, pieces, dtype=old.dtype
            )
        if old.weak_type or not old.committed:  # no public call makes such an array
            aval = new.aval.update(weak_type=old.weak_type)
            new = ArrayImpl(aval, sharding, pieces, committed=old.committed)
        if old is self.array:
            return new
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(self.array))


def _numbers(array: jax.Array) -> Any:
    """Return the data of random keys without a computation, unlike JAX's public call."""
    return array._base_array if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _on_host(shards: Iterable[Any]) -> Iterable[tuple[jax.Device, np.ndarray]]:
    """Copy shards: NumPy views of CPU arrays die with the backend. Equal shards share one copy."""
    firsts: dict[str, np.ndarray] = {}
    for shard in shards:
        values = np.asarray(shard.data)
        first = firsts.get(str(shard.index))
        if first is None or not np.array_equal(_raw(first), _raw(values)):
            first = firsts[str(shard.index)] = values.copy()
        yield shard.device, first


def _raw(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
