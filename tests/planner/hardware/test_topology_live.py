"""Topologies built from the reports of running processes."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import PlanError
from nbdist.planner.hardware.compiler_targets import compiler_target
from nbdist.planner.hardware.lookup import probed
from nbdist.planner.hardware.topology import describe, parse
from nbdist.planner.hardware.topology_live import live
from nbdist.records import Link, LocalDevices, Topology

H100 = "NVIDIA H100 80GB HBM3"


def gpus(hosts: str, devices: int, kind: str = H100) -> list[LocalDevices]:
    """Return the report of a process for each letter, on the host of that name."""
    return [LocalDevices(host=host, platform="gpu", kind=kind, devices=devices) for host in hosts]


def cpus(hosts: str, devices: int) -> list[LocalDevices]:
    return [LocalDevices(host=host, platform="cpu", kind="cpu", devices=devices) for host in hosts]


def tpus(kind: str, shape: tuple[int, int, int], slices: int = 1) -> list[LocalDevices]:
    """Return the report of a process for each four chips."""
    every = list(itertools.product(*map(range, shape)))
    return [
        LocalDevices(
            host=f"{index}-{start}",
            platform="tpu",
            kind=kind,
            devices=len(every[start : start + 4]),
            slice_index=index,
            coords=tuple(every[start : start + 4]),
        )
        for index in range(slices)
        for start in range(0, len(every), 4)
    ]


def levels_of(topology: Topology) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in topology.levels]


@pytest.mark.parametrize(
    "processes", [gpus("abcd", 8), gpus("a" * 8 + "b" * 8 + "c" * 8 + "d" * 8, 1)]
)
def test_live_gpus_match_named_topology(processes: list[LocalDevices]) -> None:
    topology, named = live(processes), parse("32xH100")
    assert (topology.chip, topology.levels) == (named.chip, named.levels)
    assert topology.assumed[0].startswith("links of host, network were not measured (")


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [
        ("TPU v5 lite", (4, 4, 1), "v5e:4x4"),
        ("TPU v5 lite", (16, 16, 1), "v5e:16x16"),
        ("TPU v5", (4, 4, 4), "v5p:4x4x4"),
        ("TPU v4", (2, 2, 1), "v4:2x2x1"),
        ("TPU v6 lite", (1, 1, 1), "v6e:1x1"),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_live_tpus_match_named_topology(
    kind: str, shape: tuple[int, int, int], name: str, slices: int
) -> None:
    topology, named = live(tpus(kind, shape, slices)), parse(f"{slices} x {name}")
    assert (topology.chip, topology.levels) == (named.chip, named.levels)


@pytest.mark.parametrize("slices", [1, 2])
def test_chips_with_two_devices_have_a_level_of_their_own(slices: int) -> None:
    """JAX lists each core of TPU v2, v3 and v7 as a device, with the coordinates of its chip."""
    cores = [
        msgspec.structs.replace(process, devices=8, coords=process.coords * 2)
        for process in tpus("TPU7x", (4, 4, 4), slices)
    ]
    topology, chips = live(cores), parse(f"{slices} x v7:4x4x4")
    assert topology.devices == 2 * chips.devices
    assert levels_of(topology) == [("chip", 2), *levels_of(chips)]
    assert topology.chip.flops["bfloat16"] == chips.chip.flops["bfloat16"] / 2
    assert topology.chip.memory_bytes == chips.chip.memory_bytes // 2
    assert [2 * level.bytes_per_s for level in topology.levels[1:]] == [
        level.bytes_per_s for level in chips.levels
    ]
    assert f"{slices} slice" in describe(topology)
    assert compiler_target(topology).name == compiler_target(chips).name


def test_cpu_processes_on_one_machine() -> None:
    topology = live(cpus("aaaa", 2))
    assert levels_of(topology) == [("process", 2), ("host", 4)]
    assert topology.levels[0].bytes_per_s > topology.levels[1].bytes_per_s
    assert topology.levels[1].alone_bytes_per_s == pytest.approx(8 * topology.levels[1].bytes_per_s)
    assert topology.assumed[0].startswith("links of process, host were not measured (assumed: ")
    assert describe(topology).startswith("8 x CPU, 4 GiB each: process of 2 x host of 4, ")


def test_cpu_processes_on_several_machines() -> None:
    assert levels_of(live(cpus("aabb", 1))) == [("process", 1), ("host", 2), ("network", 2)]
    assert levels_of(live(cpus("ab", 4))) == [("process", 4), ("network", 2)]


@given(hosts=st.integers(1, 9), processes=st.integers(1, 4), devices=st.integers(1, 4))
def test_topology_counts_all_devices(hosts: int, processes: int, devices: int) -> None:
    letters = "".join(chr(ord("a") + host) * processes for host in range(hosts))
    assert live(gpus(letters, devices)).devices == hosts * processes * devices
    assert live(cpus(letters, devices)).devices == hosts * processes * devices


def test_measured_links_replace_catalog_rates() -> None:
    link = Link(latency_s=20e-6, bytes_per_s=30e9, alone_bytes_per_s=40e9)
    topology = live(gpus("ab", 8), links={"network": link})
    outer = topology.levels[1]
    assert (outer.latency_s, outer.bytes_per_s, outer.alone_bytes_per_s) == (20e-6, 30e9, 40e9)
    assert topology.levels[0] == parse("8xH100").levels[0]
    assert topology.assumed[0].startswith("links of host were not measured (")
    every = {"host": link, "network": link}
    assert live(gpus("ab", 8), links=every).assumed == ()


def test_smallest_reported_memory_is_used() -> None:
    reports = [
        LocalDevices(host="a", platform="gpu", kind=H100, devices=1, memory_bytes=memory)
        for memory in (60 * 10**9, 61 * 10**9)
    ]
    chip = live(reports).chip
    assert chip.memory_bytes == 60 * 10**9
    assert chip.source.endswith("; memory as the runtime reports it")


def test_partial_racks_are_ignored() -> None:
    hosts = "".join(chr(ord("A") + index) for index in range(19))
    assert levels_of(live(gpus(hosts[:18], 4, "NVIDIA GB200"))) == [("host", 4), ("rack", 18)]
    assert levels_of(live(gpus(hosts, 4, "NVIDIA GB200"))) == [("host", 4), ("network", 19)]


def test_ranks_out_of_host_order_are_noted() -> None:
    note = "devices are ordered by host, which differs from the order of ranks"
    assert live(gpus("abab", 1)).assumed[0] == note
    assert note not in live(gpus("aabb", 1)).assumed


def test_unknown_plugin_uses_probed_rates() -> None:
    chip = probed("Fake 1", "fake", 2**30, {"float32": 1e9}, 1e8)
    reports = [LocalDevices(host="a", platform="fake", kind="Fake 1", devices=4)]
    topology = live(reports, chip=chip)
    assert topology.chip is chip
    assert levels_of(topology) == [("host", 4)]
    assert topology.assumed[0].startswith("links of host were not measured (assumed: PCIe 3")
    message = r"(?s)^unknown hardware 'Fake 1': .*\nor run %dist_devices --bench on the w"
    with pytest.raises(PlanError, match=message):
        live(reports)


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([], "there are no workers to plan for: run %dist_start"),
        (
            [*gpus("a", 8), *gpus("b", 8, "NVIDIA H200")],
            (
                f"the workers have different kinds of device: {H100} (of 1), NVIDIA H200 (of 1); "
                "start on machines of one kind"
            ),
        ),
        (
            [*gpus("a", 8), *gpus("b", 4)],
            (
                "the hosts have different numbers of devices (a 8, b 4), which a mesh does not "
                "allow: start with equal numbers"
            ),
        ),
        (
            [*cpus("a", 2), *cpus("a", 1)],
            (
                "the workers have different numbers of devices (0 2, 1 1), which a mesh does not "
                "allow: start with equal numbers"
            ),
        ),
        (
            [LocalDevices(host="a", platform="tpu", kind="TPU v5 lite", devices=4)],
            (
                "rank 0 reports the coordinates of 0 of its 4 TPUs, which links need: give a "
                "shape, as in v5e:4x4"
            ),
        ),
        (
            tpus("TPU v5 lite", (4, 4, 1))[:3] + tpus("TPU v5 lite", (8, 4, 1))[7:],
            "the slice's 16 TPUs do not fill the box 8x4: start on the whole slice",
        ),
        (
            [*tpus("TPU v4", (2, 2, 1)), *tpus("TPU v4", (2, 2, 2), 2)[2:]],
            (
                "slices differ (slice 0 2x2x1, slice 1 2x2x2), which a mesh does not allow: start "
                "equal slices"
            ),
        ),
    ],
)
def test_unsupported_workers_are_refused(processes: list[LocalDevices], message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        live(processes)


def test_links_of_missing_levels_are_refused() -> None:
    message = "links of moon were measured, but the levels are host"
    with pytest.raises(PlanError, match=f"^{message}$"):
        live(gpus("a", 8), links={"moon": Link(latency_s=1, bytes_per_s=1)})
