"""Topology of this host: NUMA nodes of GPUs, and network interfaces."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.utils.gpus import VISIBLE_GPUS, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_ROOT = Path("/")
_choices: list[str] = []
_UUID = re.compile(r"GPU UUID:\s*(\S+)")


def numa_nodes(gpus: Sequence[str], root: Path = _ROOT) -> tuple[int, ...]:
    """Return the NUMA nodes of GPUs, from the driver and from the kernel.

    Args:
        gpus: names as in `CUDA_VISIBLE_DEVICES`. Indices are in the order of the PCI bus.
        root: the folder that contains `proc` and `sys`.

    Returns:
        The nodes, sorted; empty if the node of a GPU is unknown, as for MIG slices.
    """
    folders = _folders(root)
    found = {next((_node(one.name, root) for one in _matching(gpu, folders)), -1) for gpu in gpus}
    return () if -1 in found else tuple(sorted(found))


def cores_beside(gpus: Sequence[str], allowed: Collection[int], root: Path = _ROOT) -> set[int]:
    """Return the cores of the NUMA nodes of GPUs.

    Args:
        gpus: names as in `CUDA_VISIBLE_DEVICES`.
        allowed: the cores that this process may use.
        root: the folder that contains `proc` and `sys`.

    Returns:
        The cores among the allowed ones; empty if the nodes are unknown.
    """
    lists = [
        (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
        for node in numa_nodes(gpus, root)
    ]
    return {core for text in lists for core in _cores(text)} & {*allowed}


def bind_to_gpus(root: Path = _ROOT) -> None:
    """Bind this process to the cores beside its GPUs, if it uses some of the host's only.

    A process with all GPUs keeps all cores: it prepares the data for all of them.
    """
    gpus = visible_gpus() if VISIBLE_GPUS in os.environ else ()
    if 0 < len(gpus) < len(_folders(root)):
        beside = cores_beside(gpus, os.sched_getaffinity(0), root)
        if beside:
            os.sched_setaffinity(0, beside)
            nodes = ", ".join(map(str, numa_nodes(gpus, root)))
            cores = "1 core" if len(beside) == 1 else f"{len(beside)} cores"
            _choices.append(f"bound to {cores} of NUMA node {nodes}, beside its GPUs")


def choose_interface(address: str) -> None:
    """Let NCCL use the interface with an address, unless the user has chosen one.

    Between hosts, NCCL uses InfiniBand or the first interface that is up. That may be a bridge or
    a slow management network, which other hosts do not reach.
    """
    if address and _NCCL_INTERFACE not in os.environ and (name := interface(address)):
        os.environ[_NCCL_INTERFACE] = f"={name}"  # `=`: this interface, not all that begin so
        _choices.append(f"{_NCCL_INTERFACE} is ={name}, the interface that other hosts reach")


def choices() -> tuple[str, ...]:
    """Return the settings that were chosen for this process, with the reasons."""
    return tuple(_choices)


def interface(address: str) -> str:
    """Return the network interface with an address; empty for loopback and unknown addresses.

    Args:
        address: an IP address, or a name that this host resolves.
    """
    try:
        known = {end[4][0] for end in socket.getaddrinfo(address, None)}
    except OSError:
        return ""
    for name, ends in psutil.net_if_addrs().items():
        if name != "lo" and known & {end.address.partition("%")[0] for end in ends}:
            return str(name)
    return ""


def _folders(root: Path) -> list[Path]:
    """Return the driver's folder of each GPU, in the order of the PCI bus."""
    return sorted((root / "proc/driver/nvidia/gpus").glob("*"))


def _matching(gpu: str, folders: Sequence[Path]) -> list[Path]:
    """Return the driver's folder of a GPU. CUDA accepts the beginning of a UUID too."""
    if gpu.isdecimal():
        return list(folders[int(gpu) : int(gpu) + 1])
    return [one for one in folders if _uuid(one).startswith(gpu)]


def _uuid(folder: Path) -> str:
    found = _UUID.search((folder / "information").read_text())
    return found[1] if found else ""


def _node(bus: str, root: Path) -> int:
    """Return the NUMA node of a PCI device; -1 if it is unknown."""
    try:
        return int((root / "sys/bus/pci/devices" / bus / "numa_node").read_text())
    except OSError:
        return -1


def _cores(text: str) -> set[int]:
    """Return the cores of a list such as `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found
