"""Diagnosis of hosts: the problems in the facts of a preflight, with their remedies."""

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
"""Tolerated difference of clocks in seconds. Beyond it, log entries of hosts sort wrongly."""

SLOW_BYTES_PER_S = 1e9 / 8
LEAST_DISK_BYTES = 2 << 30
LEAST_SHM_BYTES = 64 << 20
"""Shared memory that NCCL needs for two GPUs, with a margin; the default of containers."""

BUSY = 0.1
MANY_WORKERS = 50
"""Number of workers beyond which a ring's latency matters. Its steps grow with this number."""

_FEWER = 0.75
_SHOWN = 8
_MUST_AGREE = ("nbdist", "ipyparallel")
_OF_FRAMEWORK = {"tensorflow": ("tensorflow", "keras"), "jax": ("jax", "jaxlib")}
_OF_TPUS = ("libtpu",)
_SHOULD_AGREE = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def find(
    facts: Sequence[HostFacts],
    addresses: Sequence[str],
    reaches: Mapping[int, Sequence[Reach]],
    skew_s: Mapping[int, float],
    request: ClusterRequest,
) -> tuple[Trouble, ...]:
    """Return the problems, fatal ones first.

    Args:
        facts: the facts of each rank's host, in rank order.
        addresses: the address to which other ranks connect, in rank order.
        reaches: the connections from each rank to others.
        skew_s: the seconds by which the clock of each rank is ahead of this machine's.
        request: the request for the cluster.
    """
    found = [
        *_unreached(facts, addresses, reaches),
        *_versions(facts, request),
        *_clocks(facts, skew_s),
        *_free_space(facts),
        *_gpus(facts, request),
        *_slow(facts, reaches),
        *_mixed_devices(facts),
        *_large_ring(facts, request),
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
            what="its address belongs to the loopback interface, which other hosts cannot reach",
            advice='set `address = "..."` in hosts.toml',
            is_fatal=True,
        )


def _how_to_reach(host: str, address: str) -> str:
    return (
        f"open the ports between the hosts in the firewall, or set another network with "
        f'`address = "..."` for {host} in hosts.toml (ssh found it at {address})'
    )


def _versions(facts: Sequence[HostFacts], request: ClusterRequest) -> Iterator[Trouble]:
    def minor(one: HostFacts) -> str:
        return ".".join(one.versions["python"].split(".")[:2])

    yield from _differing(facts, "Python", minor, fatal=True)
    used = [name for framework in request.frameworks for name in _OF_FRAMEWORK[framework]]
    for package in (*_MUST_AGREE, *used, *(_OF_TPUS if request.tpu else ())):
        yield from _differing(facts, package, functools.partial(_version, package))
    for package in _SHOULD_AGREE:
        driven = [one for one in facts if one.gpus]
        yield from _differing(driven, package, functools.partial(_version, package), fatal=False)
    yield from _differing(facts, "the GPUs' driver", lambda one: one.driver, fatal=False)


def packages(
    facts: Sequence[HostFacts], theirs: Sequence[Mapping[str, str]], ours: Mapping[str, str]
) -> Iterator[Trouble]:
    """Yield the problems of packages whose versions are not those of the notebook.

    Args:
        facts: the facts of each rank's host, in rank order.
        theirs: version of each package that a host has, by its normalized name, in rank order.
        ours: versions in the notebook of the packages that cells need.
    """
    hosts: dict[tuple[tuple[str, str], ...], list[HostFacts]] = defaultdict(list)
    for one, versions in zip(facts, theirs, strict=True):
        other = tuple(
            (name, versions.get(name, ""))
            for name in sorted(ours)
            if versions.get(name) != ours[name]
        )
        if other:
            hosts[other].append(one)
    for other, ones in hosts.items():
        shown = [
            f"{name} {version or 'is missing'} (notebook: {ours[name]})" for name, version in other
        ]
        rest = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        pins = " ".join(f"{name}=={ours[name]}" for name, _ in other)
        yield Trouble(
            where=_named(ones),
            what=f"packages differ from the notebook's: {', '.join(shown[:_SHOWN])}{rest}",
            advice="start hosts over ssh with --install, or run there: "
            f"{ones[0].python} -m pip install {pins}",
            is_fatal=False,
        )


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
        described = "; ".join(f"{_named(ones)}: {value}" for value, ones in by_value.items())
        yield Trouble(
            where=_named(one for one in facts if of(one) and one not in most),
            what=f"{name} differs: {described}",
            advice="install the same on all, or use --python PATH with one environment",
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
                advice="synchronize it with NTP: the times in logs and files are wrong",
            )


def _free_space(facts: Sequence[HostFacts]) -> Iterator[Trouble]:
    for one in _each_host(facts):
        if one.disk_bytes < LEAST_DISK_BYTES:
            yield Trouble(
                where=one.host,
                what=f"only {formatting.size(one.disk_bytes)} of disk are free in {one.folder}",
                advice='free disk space, or set another `folder = "..."` in hosts.toml',
            )
        if len(one.gpus) > 1 and one.shm_bytes < LEAST_SHM_BYTES:
            yield Trouble(
                where=one.host,
                what=f"only {formatting.size(one.shm_bytes)} of shared memory are free for NCCL",
                advice="use --shm-size=1g for a container, or free space in /dev/shm",
            )


def _each_host(facts: Sequence[HostFacts]) -> list[HostFacts]:
    """Return the facts of one rank for each host."""
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
                f"{formatting.size(used)} of its memory are allocated",
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
                f"and {wanted} were requested",
                advice=f"use {one.host}:{len(one.gpus)}",
                is_fatal=True,
            )


def _slow(facts: Sequence[HostFacts], reaches: Mapping[int, Sequence[Reach]]) -> Iterator[Trouble]:
    for rank, reached in reaches.items():
        for reach in reached:
            if 0 < reach.bytes_per_s < SLOW_BYTES_PER_S:
                speed = formatting.rate(reach.bytes_per_s)
                takes = formatting.duration(2 * 100e6 / reach.bytes_per_s)
                yield Trouble(
                    where=facts[rank].host,
                    what=f"{speed} to {facts[reach.rank].host}: an all-reduce of 100 MB of "
                    f"gradients takes {takes}",
                    advice='set the fast network, if there is one, with `address = "..."` in '
                    "hosts.toml, or use a larger --batch",
                )


def _mixed_devices(facts: Sequence[HostFacts]) -> Iterator[Trouble]:
    """Find devices of different speed. Each step waits for the slowest."""
    kinds: dict[str, list[HostFacts]] = defaultdict(list)
    for one in facts:
        kinds[", ".join(dict.fromkeys(gpu.name for gpu in one.gpus)) or "no GPU"].append(one)
    if len(kinds) > 1:
        described = "; ".join(f"{_named(ones)}: {kind}" for kind, ones in kinds.items())
        yield Trouble(
            where=described,
            what=f"devices of {len(kinds)} kinds{_cost(kinds)}",
            advice="leave out the slower hosts, or train on each kind separately",
        )
    elif "no GPU" in kinds:
        cores = [one.cpus for one in facts]
        slow = [one for one in facts if one.cpus < _FEWER * max(cores)]
        if slow:
            yield Trouble(
                where=_named(slow),
                what=f"{min(cores)} cores, but {max(cores)} on others: each step waits for these",
                advice="leave them out, or use hosts with equal hardware",
            )


def _cost(kinds: Iterable[str]) -> str:
    """Describe the loss on the fastest devices, if the hardware table contains all kinds."""
    chips = [hardware_lookup.find(re.sub(r"^NVIDIA\s+", "", kind)) for kind in kinds]
    peaks = [max(chip.flops.values()) for chip in chips if chip is not None]
    if len(peaks) < 2 or None in chips:
        return ": each step waits for the slowest"
    return (
        f": each step waits for the slowest, and the fastest, with "
        f"{max(peaks) / min(peaks):.1f} times its peak, idle for {1 - min(peaks) / max(peaks):.0%}"
    )


def _large_ring(facts: Sequence[HostFacts], request: ClusterRequest) -> Iterator[Trouble]:
    has_gpus = all(one.gpus for one in facts)
    is_ring = request.communication == "ring" or not has_gpus
    if len(facts) > MANY_WORKERS and is_ring and "tensorflow" in request.frameworks:
        better = "use --communication nccl: it reduces within each host first, then in trees"
        yield Trouble(
            where=f"{len(facts)} workers",
            what=f"a ring takes {2 * len(facts) - 2} steps for each all-reduce: latency adds up",
            advice=better if has_gpus else "use fewer, larger hosts, or a larger --batch",
        )
