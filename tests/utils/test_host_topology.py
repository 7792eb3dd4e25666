"""NUMA nodes of GPUs and network interfaces.

No machine of the tests has GPUs. Files with the formats of NVIDIA's driver (proc/driver/nvidia) and
of Linux (sys) are doubles of theirs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from nbdist.utils import host_topology

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUSES = ("0000:07:00.0", "0000:0f:00.0", "0000:87:00.0", "0000:b7:00.0")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of a host with four GPUs, two on each NUMA node, and the first two cores."""
    for number, bus in enumerate(BUSES):
        driver = tmp_path / "proc/driver/nvidia/gpus" / bus
        driver.mkdir(parents=True)
        (driver / "information").write_text(
            "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 18\n"
            f"GPU UUID: \t GPU-{number}ab5-11\nBus Type: \t PCIe\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {3 - number}\n"
        )
        device = tmp_path / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number // 2}\n")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for node, cores in enumerate((f"{first},64-71", f"{second}")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    return tmp_path


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    """Cores of this process, which the test may change."""
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("gpus", "nodes"),
    [
        (("0",), (0,)),
        (("2", "3"), (1,)),
        (("3", "0"), (0, 1)),
        (("GPU-1ab5-11",), (0,)),
        (("GPU-3a",), (1,)),
        (("4",), ()),
        (("0", "MIG-c6d4f1ef"), ()),
        ((), ()),
    ],
)
def test_gpus_are_in_the_order_of_the_bus(
    gpus: tuple[str, ...], nodes: tuple[int, ...], root: Path
) -> None:
    assert host_topology.numa_nodes(gpus, root) == nodes


def test_a_kernel_without_numa_nodes_has_none(root: Path) -> None:
    (root / "sys/bus/pci/devices" / BUSES[0] / "numa_node").write_text("-1\n")
    assert host_topology.numa_nodes(["0"], root) == ()
    assert host_topology.cores_beside(["0"], {0}, root) == set()


def test_only_allowed_cores_are_used(root: Path) -> None:
    assert host_topology.cores_beside(["0", "1"], range(64, 66), root) == {64, 65}
    assert host_topology.cores_beside(["0", "1"], {5}, root) == set()


def test_a_process_with_some_gpus_is_bound_beside_them(
    root: Path, affinity: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_topology, "_choices", [])
    for visible in ("", "0,1,2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        host_topology.bind_to_gpus(root)
        assert os.sched_getaffinity(0) == affinity
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    host_topology.bind_to_gpus(root)
    assert os.sched_getaffinity(0) == affinity
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    host_topology.bind_to_gpus(root)
    assert os.sched_getaffinity(0) == {sorted(affinity)[1]}
    assert host_topology.choices() == ("bound to 1 core of NUMA node 1, beside its GPUs",)


def test_loopback_and_unknown_addresses_have_no_interface() -> None:
    assert host_topology.interface("127.0.0.1") == ""
    assert host_topology.interface("localhost") == ""
    assert host_topology.interface("192.0.2.1") == ""  # for documentation only (RFC 5737)
    assert host_topology.interface("no such host") == ""
