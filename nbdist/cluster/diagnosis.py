"""Diagnosis of hosts: the problems in the facts of a preflight, with their remedies."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from nbdist.planner.hardware import lookup as hardware_lookup
from nbdist.records import Trouble, bandwidths
from nbdist.utils.listing import listed
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
        pins = " ".join(f"{name}=={ours[name]}" for name, _ in other)
        yield Trouble(
            where=_named(ones),
            what=f"packages differ from the notebook's: {listed(shown, _SHOWN)}",
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


def slow_links(speeds: Mapping[tuple[int, int], float]) -> set[tuple[int, int]]:
    """Return the links that reach less than half of the bandwidth of others.

    The reference is the upper quartile. The median would be slow itself if one of three hosts is.

    Args:
        speeds: bytes per second from one rank to another; 0 if not measured.
    """
    half = _reference(speeds) / 2
    return {pair for pair, speed in speeds.items() if 0 < speed < half}


def _reference(speeds: Mapping[tuple[int, int], float]) -> float:
    known = sorted(speed for speed in speeds.values() if speed)
    return known[3 * len(known) // 4] if known else 0.0


def _slow(facts: Sequence[HostFacts], reaches: Mapping[int, Sequence[Reach]]) -> Iterator[Trouble]:
    speeds = bandwidths(reaches)
    if len(speeds) > len({sender for sender, _ in speeds}):  # each link was measured
        yield from _slower_than_others(facts, speeds)
    if speeds and min(speeds.values()) < SLOW_BYTES_PER_S:
        sender, receiver = min(speeds, key=speeds.__getitem__)
        slowest = speeds[sender, receiver]
        others = f", the slowest of {len(speeds)} links" if len(speeds) > 1 else ""
        yield Trouble(
            where=facts[sender].host,
            what=f"{formatting.rate(slowest)} to {facts[receiver].host}{others}: an all-reduce of "
            f"100 MB of gradients takes {formatting.duration(2 * 100e6 / slowest)}",
            advice='set the fast network, if there is one, with `address = "..."` in '
            "hosts.toml, or use a larger --batch",
        )


def _slower_than_others(
    facts: Sequence[HostFacts], speeds: Mapping[tuple[int, int], float]
) -> Iterator[Trouble]:
    """Find hosts, groups of hosts and links that are slow, in this order. A link counts once."""
    slow = slow_links(speeds)
    ranks = sorted({rank for pair in speeds for rank in pair})
    found = [
        *_slow_hosts(facts, ranks, slow),
        *_slow_groups(facts, ranks, slow),
        *(_slow_link(facts, pair) for pair in sorted(slow, key=speeds.__getitem__)),
    ]
    usual = formatting.rate(_reference(speeds))
    left, shown = set(slow), 0
    for where, does, advice, links in found:
        if left >= links and shown < _SHOWN:
            left, shown = left - links, shown + 1
            best = formatting.rate(max(speeds[link] for link in links))
            yield Trouble(where, f"{does} at most {best}, other links reach {usual}", advice)
    if left:
        yield Trouble("other hosts", f"{len(left)} more links are slow", "see the table above")


_SlowPart = tuple[str, str, str, set[tuple[int, int]]]
"""Hosts, a verb, advice, and the slow links between the hosts."""


def _slow_hosts(
    facts: Sequence[HostFacts], ranks: Sequence[int], slow: set[tuple[int, int]]
) -> Iterator[_SlowPart]:
    """Find hosts whose links to all others, from all others, or both are slow."""
    if len(ranks) < 3:
        return
    for rank in ranks:
        sent = {(rank, other) for other in ranks if other != rank}
        received = {(other, rank) for _, other in sent}
        for verb, links in (
            ("sends and receives", sent | received),
            ("sends", sent),
            ("receives", received),
        ):
            if links <= slow:
                advice = "check its cable, its port of the switch and `ethtool`, or leave it out"
                yield facts[rank].host, verb, advice, links
                break


def _slow_groups(
    facts: Sequence[HostFacts], ranks: Sequence[int], slow: set[tuple[int, int]]
) -> Iterator[_SlowPart]:
    """Find groups of hosts with fast links inside, and only slow links to another group."""
    groups: list[set[int]] = []
    for rank in ranks:
        fast = {r for r in ranks if r != rank and not {(rank, r), (r, rank)} & slow}
        near = [group for group in groups if group & fast]
        groups = [group for group in groups if group not in near]
        groups.append({rank}.union(*near))
    for one, other in itertools.combinations(groups, 2):
        links = {pair for a in one for b in other for pair in ((a, b), (b, a))}
        if min(len(one), len(other)) > 1 and links <= slow:
            names = [_named(facts[rank] for rank in sorted(group)) for group in (one, other)]
            advice = (
                "name the hosts of one group after each other in %dist_start, so that a ring "
                "passes the slow link twice only"
            )
            yield " and ".join(names), "between these groups, links reach", advice, links


def _slow_link(facts: Sequence[HostFacts], pair: tuple[int, int]) -> _SlowPart:
    sender, receiver = (facts[rank].host for rank in pair)
    advice = "check the cables, the switches and the route between the two hosts"
    return sender, f"sends to {receiver}", advice, {pair}


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
