"""Fingerprint of a call: its program, its inputs, JAX and the hardware."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import msgspec
from jax.sharding import NamedSharding, SingleDeviceSharding

from nbdist.worker.jax.runtime import platforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh, Sharding

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)")
_SHOWN_LEAVES = 4
_CPUS = Path("/proc/cpuinfo")


def fingerprint(jaxpr: Any, tree: object, leaves: Sequence[Any], mesh: Mesh | None) -> str:
    """Return a fingerprint that is the same in all processes for which a choice is valid.

    Constants that the function closes over count by shape and dtype, because their values hardly
    change the time of a call. Literals in the program count.

    Args:
        jaxpr: the function's program.
        tree: structure of its arguments without static ones.
        leaves: its inputs; shape, dtype, weak type and place count.
        mesh: the mesh of layouts.

    Returns:
        64 hexadecimal digits.
    """
    parts = (
        _text(jaxpr),
        str(tree),
        [f"{_kind(leaf)} {place(leaf)}" for leaf in leaves],
        _mesh(mesh) if mesh is not None else "",
        jax.__version__,
        jaxlib.__version__,
        jax.process_count(),
        _hardware(),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def described(leaves: Sequence[Any]) -> str:
    """Describe inputs: `float32[64,8] on cpu 0, float32[8] from the host, and 2 more`."""
    shown = [f"{_kind(leaf)} {place(leaf)}" for leaf in leaves[:_SHOWN_LEAVES]]
    more = len(leaves) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])]) or "nothing"


def place(leaf: Any) -> str:
    """Return a leaf's place, with the same name in processes that have the same devices."""
    if not isinstance(leaf, jax.Array):
        return "from the host"
    return f"on {_where(leaf.sharding)}" if leaf.committed else f"free on {_where(leaf.sharding)}"


def _where(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding):
        memory = sharding.memory_kind or ""
        return f"{_mesh(sharding.mesh)} as {sharding.spec} {memory}".rstrip()
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        platform = platforms.platform_of(device)
        own = [d for d in device.client.devices() if platforms.is_own(d)]
        return f"{platform} {own.index(device)}"
    return str(sharding)


def _mesh(mesh: Mesh) -> str:
    device = mesh.devices.flat[0]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{platforms.platform_of(device)} {axes}"


def _kind(leaf: Any) -> str:
    aval = jax.typeof(leaf)
    return str(aval.str_short()) + ("*" if aval.weak_type else "")


def _text(jaxpr: Any) -> str:
    """Return the program's text without addresses and with sorted sets, equal in all processes."""
    text = _ADDRESS.sub("0x", str(jaxpr))
    return _SET.sub(lambda found: ",".join(sorted(found[1].split(", "))), text)


@functools.cache
def _cpu() -> str:
    """Return the model of the host's CPU; empty if it is unknown."""
    if not _CPUS.exists():
        return ""
    lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _hardware() -> list[str]:
    """Return the devices of this process by platform and kind, and the CPU."""
    kinds = Counter(
        f"{platform} {device.device_kind}"
        for platform, members in platforms.all_devices().items()
        for device in members
        if platforms.is_own(device)
    )
    return [*(f"{number} x {kind}" for kind, number in kinds.items()), _cpu(), str(os.cpu_count())]
