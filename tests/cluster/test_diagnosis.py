"""Rules on the facts of hosts.

Tests cannot change the clocks, drivers and GPUs of the hosts, so made-up facts replace them.
"""

from __future__ import annotations

import msgspec
import pytest

from nbdist.cluster import diagnosis
from nbdist.cluster.diagnosis import BUSY, LEAST_DISK_BYTES, LEAST_SHM_BYTES, SLOW_BYTES_PER_S
from nbdist.records import ClusterRequest, Gpu, Host, HostFacts, Reach

GB = 1 << 30
A100 = Gpu(name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GB, used_bytes=0, busy=0.0)
V100 = Gpu(name="Tesla V100-SXM2-16GB", memory_bytes=16 * GB, used_bytes=0, busy=0.0)


def facts(rank: int, **changes: object) -> HostFacts:
    usual = HostFacts(
        rank=rank,
        host=f"gpu{rank}",
        python="/opt/python",
        versions={"python": "3.11.7", "nbdist": "1", "jax": "0.10.2"},
        folder="/home/me",
        cpus=8,
        free_bytes=60 * GB,
        disk_bytes=100 * GB,
        shm_bytes=32 * GB,
        gpus=(),
        driver="",
        time_s=0.0,
    )
    return msgspec.structs.replace(usual, **changes)


def found(
    *ones: HostFacts,
    addresses: tuple[str, ...] = (),
    reaches: dict[int, tuple[Reach, ...]] | None = None,
    skew_s: dict[int, float] | None = None,
    request: ClusterRequest | None = None,
) -> list[str]:
    """Return each problem as `fatal` or `minor`, its hosts and its description."""
    known = addresses or tuple(f"10.0.0.{one.rank}" for one in ones)
    requested = request or ClusterRequest((Host(),) * len(ones), ("jax",))
    problems = diagnosis.find(ones, known, reaches or {}, skew_s or {}, requested)
    return [
        f"{'fatal' if trouble.is_fatal else 'minor'} {trouble.where}: {trouble.what}"
        for trouble in problems
    ]


def test_equal_hosts_have_no_problems() -> None:
    assert found(facts(0), facts(1)) == []
    assert found(facts(0, gpus=(A100,) * 8), facts(1, gpus=(A100,) * 8)) == []


def test_different_versions_are_reported() -> None:
    other = {"python": "3.12.1", "nbdist": "1", "jax": "0.10.1"}
    assert found(facts(0), facts(1), facts(2, versions=other)) == [
        "fatal gpu2: Python differs: gpu0, gpu1: 3.11; gpu2: 3.12",
        "fatal gpu2: jax differs: gpu0, gpu1: 0.10.2; gpu2: 0.10.1",
    ]
    patch = {"python": "3.11.9", "nbdist": "1", "jax": "0.10.2"}
    assert found(facts(0), facts(1, versions=patch)) == []
    beside = facts(0).versions | {"tensorflow": "2.21.0"}
    assert found(facts(0), facts(1, versions=beside)) == [], "TensorFlow was not requested"
    none = {"python": "3.11.7", "nbdist": "1"}
    assert found(facts(0), facts(1, versions=none)) == [
        "fatal gpu1: jax differs: gpu0: 0.10.2; gpu1: none"
    ]


def test_different_drivers_and_gpu_libraries_are_reported() -> None:
    nccl = facts(0).versions | {"nvidia-nccl-cu12": "2.27"}
    gpus = (A100,)
    assert found(
        facts(0, gpus=gpus, driver="580.65", versions=nccl),
        facts(1, gpus=gpus, driver="570.10"),
    ) == [
        "minor gpu1: nvidia-nccl-cu12 differs: gpu0: 2.27; gpu1: none",
        "minor gpu1: the GPUs' driver differs: gpu0: 580.65; gpu1: 570.10",
    ]


def test_clock_skew_is_reported() -> None:
    assert found(facts(0), facts(1), skew_s={0: 0.9, 1: -3.0}) == [
        "minor gpu1: its clock is 3 s late"
    ]
    assert found(facts(0), facts(1), skew_s={0: 90.0}) == [
        "minor gpu0: its clock is 1 min 30 s ahead"
    ]


def test_lack_of_disk_and_shared_memory_is_reported() -> None:
    assert found(facts(0, disk_bytes=GB)) == [
        "minor gpu0: only 1.0 GiB of disk are free in /home/me"
    ]
    assert found(facts(0, gpus=(A100, A100), shm_bytes=1 << 20)) == [
        "minor gpu0: only 1.0 MiB of shared memory are free for NCCL"
    ]
    assert found(facts(0, gpus=(A100,), shm_bytes=1 << 20)) == []


def test_busy_and_missing_gpus_are_reported() -> None:
    busy = msgspec.structs.replace(A100, busy=0.5)
    full = msgspec.structs.replace(A100, used_bytes=30 * GB)
    (problem,) = found(facts(0, gpus=(A100, busy, full)))
    assert problem == "minor gpu0: GPU 1-2 in use: 30.0 GiB of its memory are allocated"
    requested = ClusterRequest((Host(name="gpu0", devices=8),), ("jax",))
    assert found(facts(0, gpus=(A100,) * 4), request=requested) == [
        "fatal gpu0: it has 4 GPUs, and 8 were requested"
    ]
    assert found(facts(0), request=requested) == []  # virtual CPU devices
    twice = ClusterRequest((Host(name="gpu0", devices=4),) * 2, ("jax",))
    assert found(facts(0, gpus=(A100,) * 4), request=twice) == [
        "fatal gpu0: it has 4 GPUs, and 8 were requested"
    ]


def test_different_devices_are_reported() -> None:
    fast, slow = (facts(0, gpus=(A100,) * 8), facts(1, gpus=(V100,) * 8))
    (problem,) = found(fast, slow)
    assert problem.startswith(
        "minor gpu0: NVIDIA A100-SXM4-40GB; gpu1: Tesla V100-SXM2-16GB: devices"
    )
    assert "and the fastest, with 5.0 times its peak, idle for 80%" in problem
    (problem,) = found(fast, facts(1))
    assert problem.startswith("minor gpu0: NVIDIA A100-SXM4-40GB; gpu1: no GPU: devices of 2 kinds")
    (problem,) = found(facts(0, cpus=64), facts(1, cpus=8))
    assert problem == "minor gpu1: 8 cores, but 64 on others: each step waits for these"
    unknown = msgspec.structs.replace(A100, name="Banana 9000")
    (problem,) = found(fast, facts(1, gpus=(unknown,)))
    assert problem.endswith("devices of 2 kinds: each step waits for the slowest")
    (problem,) = found(fast, slow, facts(2, gpus=(unknown,)))
    assert problem.endswith("devices of 3 kinds: each step waits for the slowest")


def test_a_loopback_address_of_a_remote_host_is_reported() -> None:
    (problem,) = found(facts(0), facts(1), addresses=("10.0.0.1", "127.0.1.1"))
    assert problem.startswith("fatal gpu1: its address belongs to the loopback")
    alone = facts(1, host="gpu0")
    assert found(facts(0), alone, addresses=("127.0.0.1", "127.0.0.1")) == []


def test_an_unreachable_host_is_reported_once() -> None:
    reaches = {rank: (Reach(2, fault="timed out"),) for rank in (0, 1)}
    assert found(facts(0), facts(1), facts(2), reaches=reaches) == [
        "fatal gpu0, gpu1: cannot connect to gpu2 at 10.0.0.2: timed out"
    ]


def test_a_ring_of_many_workers_is_reported() -> None:
    many = [facts(rank) for rank in range(51)]
    requested = ClusterRequest((Host(),) * 51, ("tensorflow",), communication="ring")
    assert found(*many, request=requested) == [
        "minor 51 workers: a ring takes 100 steps for each all-reduce: latency adds up"
    ]
    assert found(*many[:50], request=requested) == []
    assert found(*many) == []


def advice(*ones: HostFacts, reaches: dict[int, tuple[Reach, ...]] | None = None) -> list[str]:
    """Return the remedy of each problem."""
    addresses = tuple(f"10.0.0.{one.rank}" for one in ones)
    requested = ClusterRequest((Host(),) * len(ones), ("jax",))
    problems = diagnosis.find(ones, addresses, reaches or {}, {}, requested)
    return [trouble.advice for trouble in problems]


def test_fatal_problems_come_first_and_others_keep_their_order() -> None:
    requested = ClusterRequest((Host(name="gpu0", devices=2),), ("jax",))
    problems = found(facts(0, gpus=(A100,), disk_bytes=GB), skew_s={0: 5.0}, request=requested)
    assert [problem.split(":")[0] for problem in problems] == ["fatal gpu0", *["minor gpu0"] * 2]
    assert "clock" in problems[1]
    assert "disk" in problems[2]


def test_a_problem_at_its_limit_is_not_reported() -> None:
    limits = {"disk_bytes": LEAST_DISK_BYTES, "shm_bytes": LEAST_SHM_BYTES}
    used = int(BUSY * A100.memory_bytes)
    gpu = msgspec.structs.replace(A100, busy=BUSY, used_bytes=used)
    reaches = {0: (Reach(1, bytes_per_s=SLOW_BYTES_PER_S),), 1: (Reach(0, bytes_per_s=0.0),)}
    ones = facts(0, gpus=(gpu,) * 2, **limits), facts(1, gpus=(gpu,) * 2, **limits)
    assert found(*ones, reaches=reaches, skew_s={0: 1.0, 1: -1.0}) == []
    assert found(facts(0, cpus=8), facts(1, cpus=6)) == []
    assert found(facts(0, cpus=8), facts(1, cpus=5)) != []


def test_the_slowest_link_is_reported_with_the_time_of_an_all_reduce() -> None:
    reaches = {1: (Reach(0, bytes_per_s=10e6), Reach(2))}
    assert found(facts(0), facts(1), facts(2), reaches=reaches) == [
        "minor gpu1: 10.0 MB/s to gpu0: an all-reduce of 100 MB of gradients takes 20 s"
    ]
    reaches[0] = (Reach(1, bytes_per_s=5e6),)
    assert found(facts(0), facts(1), facts(2), reaches=reaches) == [
        (
            "minor gpu0: 5.0 MB/s to gpu1, the slowest of 2 links: an all-reduce of 100 MB of "
            "gradients takes 40 s"
        )
    ]


def links(count: int, slow: dict[tuple[int, int], float]) -> list[str]:
    """Return the problems of links of 1 GB/s, except slow ones, without the cost of the slowest."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    speeds = {(a, b): slow.get((a, b), 1e9) for a, b in pairs}
    reaches = {
        a: tuple(Reach(b, bytes_per_s=speeds[a, b]) for b in range(count) if b != a)
        for a in range(count)
    }
    lines = found(*map(facts, range(count)), reaches=reaches)
    return [line for line in lines if "an all-reduce of 100 MB" not in line]


def test_a_link_that_is_slower_than_others_is_named() -> None:
    assert links(4, {}) == []
    assert links(4, {(0, 1): 0.51e9}) == []
    assert links(4, {(0, 1): 0.4e9}) == [
        "minor gpu0: sends to gpu1 at most 400 MB/s, other links reach 1.0 GB/s"
    ]


@pytest.mark.parametrize("count", [3, 6])
def test_a_host_whose_links_are_slow_is_named_once(count: int) -> None:
    sent = {(1, b): 1e8 for b in range(count)}
    received = {(a, 1): 2e8 for a in range(count)}
    ends = "MB/s, other links reach 1.0 GB/s"
    assert links(count, sent) == [f"minor gpu1: sends at most 100 {ends}"]
    assert links(count, received) == [f"minor gpu1: receives at most 200 {ends}"]
    assert links(count, sent | received) == [f"minor gpu1: sends and receives at most 200 {ends}"]


def test_groups_of_hosts_with_slow_links_between_them_are_named() -> None:
    across = {(a, b): 1e8 for a in range(5) for b in range(5) if (a in (0, 3)) != (b in (0, 3))}
    assert links(5, across) == [
        (
            "minor gpu0, gpu3 and gpu1, gpu2, gpu4: between these groups, links reach at most "
            "100 MB/s, other links reach 1.0 GB/s"
        )
    ]


def test_many_slow_links_are_counted() -> None:
    single = {(a, a + 1): 1e6 * (a + 1) for a in range(0, 20, 2)}
    lines = links(21, single)
    assert lines[0] == "minor gpu0: sends to gpu1 at most 1.0 MB/s, other links reach 1.0 GB/s"
    assert lines[8:] == ["minor other hosts: 2 more links are slow"]


def test_each_host_is_reported_once_for_all_its_ranks() -> None:
    shared = {"host": "gpu0", "disk_bytes": GB}
    assert len(found(facts(0, **shared), facts(1, **shared))) == 1
    busy = {"host": "gpu0", "gpus": (msgspec.structs.replace(A100, busy=0.5),)}
    assert len(found(facts(0, **busy), facts(1, **busy))) == 1


def test_failed_connections_are_sorted_by_rank_and_reason() -> None:
    reaches = {
        0: (Reach(2, fault="timed out"), Reach(1, fault="refused")),
        1: (Reach(2, fault="refused"),),
        2: (Reach(0),),
    }
    assert found(facts(0), facts(1), facts(2), reaches=reaches) == [
        "fatal gpu0: cannot connect to gpu1 at 10.0.0.1: refused",
        "fatal gpu1: cannot connect to gpu2 at 10.0.0.2: refused",
        "fatal gpu0: cannot connect to gpu2 at 10.0.0.2: timed out",
    ]
    (remedy,) = advice(facts(0), facts(1), reaches={0: (Reach(1, fault="timed out"),)})
    assert '`address = "..."` for gpu1 in hosts.toml (ssh found it at 10.0.0.1)' in remedy


@pytest.mark.parametrize(
    ("busy", "remedy"),
    [
        ((0,), 'wait, or use the others: `env = {CUDA_VISIBLE_DEVICES = "1,2"}` in hosts.toml'),
        ((0, 1, 2), "wait, or use another host"),
    ],
)
def test_free_gpus_beside_busy_ones_are_proposed(busy: tuple[int, ...], remedy: str) -> None:
    used = msgspec.structs.replace(A100, busy=1.0)
    gpus = tuple(used if number in busy else A100 for number in range(3))
    assert advice(facts(0, gpus=gpus)) == [remedy]


def test_the_larger_group_of_hosts_is_right_about_a_version() -> None:
    new = {"python": "3.11.7", "nbdist": "2", "jax": "0.10.2"}
    assert found(facts(0), facts(1, versions=new), facts(2, versions=new)) == [
        "fatal gpu0: nbdist differs: gpu0: 1; gpu1, gpu2: 2"
    ]


def test_libraries_of_gpus_may_differ_on_hosts_without_gpus() -> None:
    nccl = facts(0).versions | {"nvidia-nccl-cu12": "2.27"}
    assert found(facts(0, versions=nccl), facts(1)) == []


def test_a_ring_is_reported_only_for_tensorflow_and_without_nccl() -> None:
    gpus = [facts(rank, gpus=(A100,)) for rank in range(51)]
    hosts = (Host(),) * 51
    auto = ClusterRequest(hosts, ("tensorflow",))
    assert found(*gpus, request=auto) == []
    assert len(found(*gpus, request=msgspec.structs.replace(auto, communication="ring"))) == 1
    without = [facts(rank) for rank in range(51)]
    assert len(found(*without, request=auto)) == 1
    assert found(*without, request=msgspec.structs.replace(auto, frameworks=("jax",))) == []
