"""Times of collectives over a mesh axis, from the levels of links that the axis crosses.

The model is alpha-beta: a number of messages in sequence, each with its latency, and bytes over
bandwidth. An axis over several levels reduces within the inner level first, so that the slower
links outside carry only each device's share.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records.topology import Extent, Level, Topology

NETWORKS = ("network", "DCN")
"""Names of levels between hosts."""


def all_reduce_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds to sum arrays of `nbytes`, one on each device, on every device of an axis.

    A ring carries 2 (n - 1)/n of the bytes in 2 (n - 1) messages. Over levels: reduce-scatter
    inside, all-reduce of the share outside, all-gather inside. All devices communicate outside at
    once, each with its peers. Between hosts of GPUs NCCL uses one ring, or a pair of trees, through
    all devices.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009 (ring). Goyal
    et al., arXiv:1706.02677, section 4 (levels). S. Jeaugey, "Massively Scale Your Deep Learning
    Training with NCCL 2.4", 2019 (hosts of GPUs).
    """
    if prod(extent) == 1:
        return 0.0
    local_s = calibration.local_passes * nbytes / topology.chip.bytes_per_s
    return (
        calibration.collective_s + local_s + _reduce_levels_s(nbytes, extent, topology, calibration)
    )


def reduce_scatter_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds to sum arrays of `nbytes`, so that every device has its share of the sum.

    Half an all-reduce: (n - 1)/n of the bytes in n - 1 messages, inner levels first.
    """
    if prod(extent) == 1:
        return 0.0
    local_s = calibration.local_passes / 2 * nbytes / topology.chip.bytes_per_s
    return calibration.collective_s + local_s + _phases_s(nbytes, extent, topology, calibration)


def all_gather_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds to gather an array of `nbytes`, of which every device has a share.

    A reduce-scatter in reverse: the same messages, outer levels first.
    """
    return reduce_scatter_s(nbytes, extent, topology, calibration)


def all_to_all_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds in which every device sends an equal part of `nbytes` to each other one.

    If links join all pairs, (n - 1)/n of the bytes leave a device in n - 1 messages. On a ring a
    part travels n/4 links on average, and half of the parts go each way. Levels are passed in
    sequence, with all bytes.

    Source: "How to Scale Your Model", section "Sharded Matrices", jax-ml/scaling-book (ring).
    """
    if prod(extent) == 1:
        return 0.0
    return calibration.collective_s + sum(
        _exchange_s(nbytes, size, index, topology, calibration)
        for index, size in enumerate(extent)
        if size > 1
    )


def send_s(nbytes: float, level: int, topology: Topology, calibration: Calibration) -> float:
    """Return the seconds of one message of `nbytes` over the links of a level."""
    link = topology.levels[level]
    return calibration.collective_s + link.latency_s + nbytes / _bandwidth(link, calibration)


def _reduce_levels_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    if _through_hosts(extent, topology):
        ring_s = 2 * _ring_through_s(nbytes, extent, topology, calibration)
        return min(ring_s, _trees_s(nbytes, extent, topology, calibration))
    return 2 * _by_levels_s(nbytes, extent, topology, calibration)


def _phases_s(nbytes: float, extent: Extent, topology: Topology, calibration: Calibration) -> float:
    if _through_hosts(extent, topology):
        return _ring_through_s(nbytes, extent, topology, calibration)
    return _by_levels_s(nbytes, extent, topology, calibration)


def _by_levels_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    seconds, share = 0.0, nbytes
    for index, size in enumerate(extent):
        seconds += _phase_s(share, size, index, topology, calibration)
        share /= size
    return seconds


def _through_hosts(extent: Extent, topology: Topology) -> bool:
    """Return True if NCCL runs it, with rings and trees through all devices instead of levels."""
    outermost = max(index for index, size in enumerate(extent) if size > 1)
    return topology.chip.platform == "gpu" and topology.levels[outermost].name in NETWORKS


def _ring_through_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds of a reduce-scatter or all-gather by rings that cross hosts in parallel.

    Each ring leaves a host from another device. All links work at the same time, so the slowest
    counts. As many messages as there are hosts cross between them (NCCL, src/graph/tuning.cc).
    """
    ranks, hosts = prod(extent), _hosts(extent, topology)
    outside = min(hosts, ranks - 1)
    near_s, far_s = _latencies(extent, topology)
    messages_s = (ranks - 1 - outside) * near_s + outside * far_s
    share = (ranks - 1) / ranks * nbytes
    return messages_s + share / _slowest(extent, topology, calibration)


def _trees_s(nbytes: float, extent: Extent, topology: Topology, calibration: Calibration) -> float:
    """Return the seconds of an all-reduce by two trees of hosts, each a chain inside a host.

    It takes fewer messages and all of the bytes. NCCL contains it since version 2.4.

    Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", 2009.
    """
    ranks, hosts = prod(extent), _hosts(extent, topology)
    near_s, far_s = _latencies(extent, topology)
    messages_s = (ranks // hosts - 1) * near_s + ceil(log2(hosts)) * far_s
    return 2 * (messages_s + nbytes / _slowest(extent, topology, calibration))


def _hosts(extent: Extent, topology: Topology) -> int:
    return prod(
        size for size, level in zip(extent, topology.levels, strict=True) if level.name in NETWORKS
    )


def _latencies(extent: Extent, topology: Topology) -> tuple[float, float]:
    """Return the latencies of a message within a host and between hosts, in seconds."""
    crossed = [level for size, level in zip(extent, topology.levels, strict=True) if size > 1]
    near = [level.latency_s for level in crossed if level.name not in NETWORKS]
    return max(near, default=0.0), crossed[-1].latency_s


def _slowest(extent: Extent, topology: Topology, calibration: Calibration) -> float:
    """Return the bytes per second of the slowest level, for all devices of a group together."""
    together, rates = 1, []
    for size, level in zip(extent, topology.levels, strict=True):
        if level.name in NETWORKS:
            rates.append(together * _bandwidth(level, calibration))
        elif size > 1:
            rates.append(_bandwidth(level, calibration))
            together *= size
    return min(rates)


def _phase_s(
    nbytes: float, size: int, index: int, topology: Topology, calibration: Calibration
) -> float:
    """Return the seconds of a reduce-scatter or all-gather of `nbytes` by a ring in one level.

    If links join neighbours and close a ring, half of the bytes go each way around.
    """
    link = topology.levels[index]
    ways = 2 if link.ring and link.wraps else 1
    bandwidth = ways * _bandwidth(link, calibration)
    return (size - 1) * (link.latency_s + nbytes / size / bandwidth)


def _exchange_s(
    nbytes: float, size: int, index: int, topology: Topology, calibration: Calibration
) -> float:
    link = topology.levels[index]
    travelled = _crossing(size, link.wraps) if link.ring else (size - 1) / size
    return (size - 1) * link.latency_s + nbytes * travelled / _bandwidth(link, calibration)


def _crossing(size: int, wraps: bool) -> float:
    """Return the share of a device's bytes on the busiest link of a ring or line, one way.

    Half of the devices send to the other half over the middle link; a ring has two of these.
    """
    half = size // 2 * -(-size // 2) / size
    return half / 2 if wraps else half


def _bandwidth(link: Level, calibration: Calibration) -> float:
    is_network = link.name in NETWORKS
    efficiency = calibration.network_efficiency if is_network else calibration.link_efficiency
    return link.bytes_per_s * efficiency
