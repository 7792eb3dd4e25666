"""Devices of all platforms that JAX has started, with their names."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import jax
import jax.extend.backend
import psutil

from nbdist.records import DeviceState
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device

_ALSO_CALLED = {"cuda": "gpu", "rocm": "gpu"}
_PLUGINS = "jax_plugins"
"""Entry point group for PJRT plugins of JAX: openxla.org/xla/pjrt_integration."""


def all_devices() -> dict[str, Sequence[Device]]:
    """Return the devices of all processes by platform, JAX's default platform first."""
    backends = jax.extend.backend.backends()
    default = jax.extend.backend.get_backend()
    ordered = sorted(backends.items(), key=lambda item: item[1] is not default)
    return {name: backend.devices() for name, backend in ordered if backend.device_count()}


def platform_of(device: Device) -> str:
    """Return the platform's name for `jax.devices(...)`: `cpu`, `cuda`, `tpu`, `my_pjrt`."""
    backends = jax.extend.backend.backends().items()
    found = (name for name, backend in backends if backend is device.client)
    name: str = next(found, device.platform)
    return name


def name_of(device: Device) -> str:
    """Return a unique name such as `cuda:0`: the platform and JAX's id of the device."""
    return f"{platform_of(device)}:{device.id}"


def is_called(platform: str, word: str) -> bool:
    """Return True if a word names this platform: CUDA and ROCm are also called `gpu`."""
    return word in {platform, _ALSO_CALLED.get(platform, platform)}


def is_own(device: Device) -> bool:
    """Return True if the device belongs to this process."""
    own: bool = device.process_index == device.client.process_index()
    return own


def plugin_of(platform: str) -> str:
    """Return the package that provides a platform, with its version."""
    for point in importlib.metadata.entry_points(group=_PLUGINS):
        if platform in point.name and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    carrier = "libtpu" if platform == "tpu" else "jaxlib"
    return f"{carrier} {importlib.metadata.version(carrier)}"


def free_bytes(device: Device) -> int | None:
    """Return the free memory of a device in bytes; for a CPU, the available memory of the host.

    Returns None if it is unknown, such as for devices of other processes.
    """
    if not is_own(device):
        return None
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    available: int = psutil.virtual_memory().available
    return available if device.platform == "cpu" else None


def roomiest(devices: Sequence[Device]) -> Device:
    """Return the device with the most free memory; of CPUs, which share the host's, the first."""
    return max(devices, key=lambda d: 0 if d.platform == "cpu" else free_bytes(d) or 0)


def by_process(devices: Sequence[Device]) -> list[Device]:
    """Return devices by process, so that the rows of a batch on a process are consecutive.

    TPUs of a process are in the order of a path along the torus. `jax.make_mesh` takes such a path
    through the whole slice instead, across processes, and supports only one slice.
    """
    return sorted(devices, key=lambda d: (d.process_index, _on_path(d), d.id))


def _on_path(device: Device) -> tuple[int, ...]:
    if device.platform != "tpu":
        return ()
    x, y, z = device.coords
    return z, -y if z % 2 else y, -x if (y + z) % 2 else x


def states() -> list[DeviceState]:
    """Return the states of all known devices; the memory use of other processes' is unknown."""
    hosts = processes.hosts()
    return [
        _state(device, platform, hosts[device.process_index])
        for platform, members in all_devices().items()
        for device in members
    ]


def own_states() -> list[DeviceState]:
    """Return the states of this process's devices on its default platform."""
    platform = platform_of(jax.local_devices()[0])
    host = processes.hosts()[jax.process_index()]
    return [_state(device, platform, host) for device in jax.local_devices()]


def _state(device: Device, platform: str, host: str) -> DeviceState:
    size, used = _memory(device) if is_own(device) else (None, None)
    return DeviceState(
        name=name_of(device),
        platform=platform,
        kind=device.device_kind,
        process=device.process_index,
        host=host,
        plugin=plugin_of(platform),
        memory_bytes=size,
        used_bytes=used,
    )


def _memory(device: Device) -> tuple[int | None, int | None]:
    """Return the memory limit and the used memory in bytes; for a CPU, those of the host."""
    if device.platform == "cpu":
        host = psutil.virtual_memory()
        return host.total, host.total - host.available
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit"), stats.get("bytes_in_use")
