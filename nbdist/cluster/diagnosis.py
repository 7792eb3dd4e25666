"""What is wrong with hosts, by what was looked at: each trouble, where, and what to type."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from nbdist.planner.hardware import lookup as hardware_lookup
from nbdist.records import Trouble
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.records import ClusterRequest, HostFacts, Reach

SKEW_S = 1.0
"""Clocks that differ by more say wrongly in logs what came first."""

SLOW_BYTES_PER_S = 1e9 / 8
LEAST_DISK_BYTES = 2 << 30
LEAST_SHM_BYTES = 64 << 20
"""What NCCL takes of it for two GPUs, and some to spare; containers are given so much."""

BUSY = 0.1
MANY_WORKERS = 50
"""Beyond it, a ring's latency shows: its steps are as many as workers."""

_FEWER = 0.75
_MUST_AGREE = ("nbdist", "ipyparallel")
_OF_FRAMEWORK = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "jaxlib")}
_SHOULD_AGREE = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def find(
    facts: Sequence[HostFacts],
    addresses: Sequence[str],
    reaches: Mapping[int, Sequence[Reach]],
    skew_s: Mapping[int, float],
    request: ClusterRequest,
) -> tuple[Trouble, ...]:
    """What is wrong, fatal troubles first.

    Args:
        facts: of each rank.
        addresses: to which the others connect, likewise.
        reaches: how ranks reach each other.
        skew_s: by how much each one's clock is ahead of this machine's.
        request: what was asked for.
    """
    found = [
        *_unreached(facts, addresses, reaches),
        *_versions(facts, request),
        *_clocks(facts, skew_s),
        *_room(facts),
        *_gpus(facts, request),
        *_slow(facts, reaches),
        *_unlike(facts),
        *_many(facts, request),
    ]
    return tuple(sorted(found, key=lambda trouble: not trouble.is_fatal))


def _named(facts: Iterable[HostFacts]) -> str:
    return ", ".join(dict.fromkeys(one.host for one in facts))


def _unreached(
    facts: Sequence[HostFacts], addresses: Sequence[str], reaches: Mapping[int, Sequence[Reach]]
) -> Iterator[Trouble]:
    by_end: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, reached in reaches.items():
        for reach in reached:
            if reach.fault:
                by_end[reach.rank, reach.fault].append(rank)
    for (end, fault), ranks in sorted(by_end.items()):
        host, address = facts[end].host, addresses[end]
        yield Trouble(
            where=_named(facts[rank] for rank in ranks),
            what=f"cannot connect to {host} at {address}: {fault}",
            advice=_how_to_reach(host, address),
            is_fatal=True,
        )
    loops = [one for one in facts if addresses[one.rank].startswith("127.")]
    if 0 < len(loops) < len(facts):  # else all of them are on one machine
        yield Trouble(
            where=_named(loops),
            what="others would connect to it at an address of the loopback interface",
            advice='give it `address = "..."` in hosts.toml',
            is_fatal=True,
        )


def _how_to_reach(host: str, address: str) -> str:
    return (
        f"let the hosts reach each other's ports (a firewall?), or name another network: "
        f'`address = "..."` for {host} in hosts.toml, as {address} is where ssh found it'
    )


def _versions(facts: Sequence[HostFacts], request: ClusterRequest) -> Iterator[Trouble]:
    def minor(one: HostFacts) -> str:
        return ".".join(one.versions["python"].split(".")[:2])

    yield from _differing(facts, "Python", minor, fatal=True)
    used = (name for framework in request.frameworks for name in _OF_FRAMEWORK[framework])
    for package in (*_MUST_AGREE, *used):
        yield from _differing(facts, package, functools.partial(_version, package))
    for package in _SHOULD_AGREE:
        driven = [one for one in facts if one.gpus]
        yield from _differing(driven, package, functools.partial(_version, package), fatal=False)
    yield from _differing(facts, "the GPUs' driver", lambda one: one.driver, fatal=False)


def _version(package: str, one: HostFacts) -> str:
    return one.versions.get(package, "none")


def _differing(
    facts: Sequence[HostFacts], name: str, of: Callable[[HostFacts], str], *, fatal: bool = True
) -> Iterator[Trouble]:
    by_value: dict[str, list[HostFacts]] = defaultdict(list)
    for one in facts:
        if of(one):
            by_value[of(one)].append(one)
    if len(by_value) > 1:
        most = max(by_value.values(), key=len)
        said = "; ".join(f"{_named(ones)}: {value}" for value, ones in by_value.items())
        yield Trouble(
            where=_named(one for one in facts if of(one) and one not in most),
            what=f"{name} differs: {said}",
            advice="install the same on all, or type --python PATH of one environment",
            is_fatal=fatal,
        )


def _clocks(facts: Sequence[HostFacts], skew_s: Mapping[int, float]) -> Iterator[Trouble]:
    for one in facts:
        skew = skew_s.get(one.rank, 0.0)
        if abs(skew) > SKEW_S:
            yield Trouble(
                where=one.host,
                what=f"its clock is {formatting.duration(abs(skew))} "
                f"{'ahead' if skew > 0 else 'late'}",
                advice="have it set by NTP: logs and files say wrongly what came first",
            )


def _room(facts: Sequence[HostFacts]) -> Iterator[Trouble]:
    for one in _each_host(facts):
        if one.disk_bytes < LEAST_DISK_BYTES:
            yield Trouble(
                where=one.host,
                what=f"{formatting.memory(one.disk_bytes)} of disk are free in {one.folder}",
                advice='free some, or give it another `folder = "..."` in hosts.toml',
            )
        if len(one.gpus) > 1 and one.shm_bytes < LEAST_SHM_BYTES:
            yield Trouble(
                where=one.host,
                what=f"{formatting.memory(one.shm_bytes)} of shared memory are free, "
                "which NCCL uses",
                advice="in a container: --shm-size=1g; else free some in /dev/shm",
            )


def _each_host(facts: Sequence[HostFacts]) -> list[HostFacts]:
    """One rank's for each host."""
    return list({one.host: one for one in reversed(facts)}.values())[::-1]


def _gpus(facts: Sequence[HostFacts], request: ClusterRequest) -> Iterator[Trouble]:
    for one in _each_host(facts):
        busy = [
            number
            for number, gpu in enumerate(one.gpus)
            if gpu.busy > BUSY or gpu.used_bytes > BUSY * gpu.memory_bytes
        ]
        if busy:
            used = sum(one.gpus[number].used_bytes for number in busy)
            free = [str(n) for n in range(len(one.gpus)) if n not in busy]
            env = f'`env = {{CUDA_VISIBLE_DEVICES = "{",".join(free)}"}}` in hosts.toml'
            yield Trouble(
                where=one.host,
                what=f"GPU {formatting.ranks(busy)} in use: "
                f"{formatting.memory(used)} are taken there",
                advice=f"wait, or use the others: {env}" if free else "wait, or use another host",
            )
    asked: Counter[str] = Counter()
    for host in request.hosts:
        asked[host.key] += host.devices
    for one in _each_host(facts):
        wanted = asked[one.host]
        if 0 < len(one.gpus) < wanted:
            yield Trouble(
                where=one.host,
                what=f"it has {formatting.count(len(one.gpus), 'GPU')}, "
                f"and {wanted} were asked for",
                advice=f"type {one.host}:{len(one.gpus)}",
                is_fatal=True,
            )


def _slow(facts: Sequence[HostFacts], reaches: Mapping[int, Sequence[Reach]]) -> Iterator[Trouble]:
    for rank, reached in reaches.items():
        for reach in reached:
            if 0 < reach.bytes_per_s < SLOW_BYTES_PER_S:
                speed = f"{formatting.size(reach.bytes_per_s)}/s"
                takes = formatting.duration(2 * 100e6 / reach.bytes_per_s)
                yield Trouble(
                    where=facts[rank].host,
                    what=f"{speed} to {facts[reach.rank].host}: to sum up gradients of 100 MB "
                    f"takes {takes}",
                    advice='name the fast network, if there is one: `address = "..."` in '
                    "hosts.toml; else a larger --batch",
                )


def _unlike(facts: Sequence[HostFacts]) -> Iterator[Trouble]:
    """Each step waits for the slowest."""
    kinds: dict[str, list[HostFacts]] = defaultdict(list)
    for one in facts:
        kinds[", ".join(dict.fromkeys(gpu.name for gpu in one.gpus)) or "no GPU"].append(one)
    if len(kinds) > 1:
        said = "; ".join(f"{_named(ones)}: {kind}" for kind, ones in kinds.items())
        yield Trouble(
            where=said,
            what=f"devices of {len(kinds)} kinds{_cost(kinds)}",
            advice="leave out the slower hosts, or train on each kind by itself",
        )
    elif "no GPU" in kinds:
        cores = [one.cpus for one in facts]
        slow = [one for one in facts if one.cpus < _FEWER * max(cores)]
        if slow:
            yield Trouble(
                where=_named(slow),
                what=f"{min(cores)} cores, and {max(cores)} on others: each step waits for these",
                advice="leave them out, or name hosts that are alike",
            )


def _cost(kinds: Iterable[str]) -> str:
    """How much of the faster ones is lost, where the table knows both."""
    chips = [hardware_lookup.find(re.sub(r"^NVIDIA\s+", "", kind)) for kind in kinds]
    peaks = [max(chip.flops.values()) for chip in chips if chip is not None]
    if len(peaks) < 2 or None in chips:
        return ": each step waits for the slowest"
    return (
        f": each step waits for the slowest, so that the fastest, with "
        f"{max(peaks) / min(peaks):.1f} times its peak, idle for {1 - min(peaks) / max(peaks):.0%}"
    )


def _many(facts: Sequence[HostFacts], request: ClusterRequest) -> Iterator[Trouble]:
    has_gpus = all(one.gpus for one in facts)
    is_ring = request.communication == "ring" or not has_gpus
    if len(facts) > MANY_WORKERS and is_ring and "tensorflow" in request.frameworks:
        better = "type --communication nccl, which sums up in a host first, then in trees"
        yield Trouble(
            where=f"{len(facts)} workers",
            what=f"a ring goes {2 * len(facts) - 2} times round for each sum: latency adds up",
            advice=better if has_gpus else "use fewer, larger hosts, or a larger --batch",
        )
