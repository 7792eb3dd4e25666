"""What a choice of a place holds for: a program, its inputs, JAX and the hardware."""

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
    """The same in every process in which a choice holds.

    Constants that the function closes over count by shape and dtype, as they do in the program's
    text: what they hold hardly changes how long a call takes. Numbers in the program count.

    Args:
        jaxpr: of the function.
        tree: the structure of its arguments, statics left out.
        leaves: its inputs, of which shape, dtype, weak type and place count.
        mesh: that layouts are over.

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
    """Inputs in words: `float32[64,8] on cpu 0, float32[8] from the host, and 2 more`."""
    said = [f"{_kind(leaf)} {place(leaf)}" for leaf in leaves[:_SHOWN_LEAVES]]
    more = len(leaves) - len(said)
    return ", ".join([*said, *([f"and {more} more"] if more else [])]) or "nothing"


def place(leaf: Any) -> str:
    """Where it is, as it is called in each process that has the same devices of its own."""
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
    """Without addresses, and with sets in one order: strings hash otherwise in each process."""
    text = _ADDRESS.sub("0x", str(jaxpr))
    return _SET.sub(lambda found: ",".join(sorted(found[1].split(", "))), text)


@functools.cache
def _cpu() -> str:
    """The model of the host's CPU; empty where the system does not say."""
    if not _CPUS.exists():
        return ""
    lines = _CPUS.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _hardware() -> list[str]:
    """Of this process: the devices by platform and kind, and the CPU."""
    kinds = Counter(
        f"{platform} {device.device_kind}"
        for platform, members in platforms.all_devices().items()
        for device in members
        if platforms.is_own(device)
    )
    return [*(f"{number} x {kind}" for kind, number in kinds.items()), _cpu(), str(os.cpu_count())]
