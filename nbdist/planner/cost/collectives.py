"""How long a collective takes over a mesh axis, by how the axis lies in the topology.

All is alpha-beta: a number of messages one after the other, each with its latency, and bytes over
bandwidth (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005). An axis that lies in several levels does what its inner level can do first, so that
the slower links outside carry only each device's share.
"""

from __future__ import annotations

from math import ceil, log2, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records.topology import Extent, Level, Topology

NETWORKS = ("network", "DCN")
"""What levels between hosts are called."""


def all_reduce_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Seconds until every device of the axis has the sum of arrays of `nbytes`, one on each.

    A ring carries 2 (n - 1)/n of the bytes in 2 (n - 1) messages (Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms", JPDC 2009). Over levels: reduce-scatter inside, all-reduce of
    the share outside, all-gather inside (Goyal et al., arXiv:1706.02677, section 4), every device
    with its peers outside, so that all send at once. Between hosts of GPUs NCCL does otherwise:
    one ring, or a pair of trees, through all of them (S. Jeaugey, "Massively Scale Your Deep
    Learning Training with NCCL 2.4", 2019).
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
    """Seconds until every device has its share of the sum of arrays of `nbytes`, one on each.

    Half an all-reduce: (n - 1)/n of the bytes in n - 1 messages, inner levels first.
    """
    if prod(extent) == 1:
        return 0.0
    local_s = calibration.local_passes / 2 * nbytes / topology.chip.bytes_per_s
    return calibration.collective_s + local_s + _phases_s(nbytes, extent, topology, calibration)


def all_gather_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Seconds until every device has all of an array of `nbytes` of which each had a share.

    A reduce-scatter backwards: the same messages, outer levels first.
    """
    return reduce_scatter_s(nbytes, extent, topology, calibration)


def all_to_all_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Seconds until every device has sent an equal part of its `nbytes` to each of the axis.

    Where all join all, (n - 1)/n of the bytes leave a device, in n - 1 messages. On a ring a part
    travels n/4 links on average, and half of them go each way ("How to Scale Your Model", section
    "Sharded Matrices", jax-ml/scaling-book). Levels are passed one after the other, with all bytes.
    """
    if prod(extent) == 1:
        return 0.0
    return calibration.collective_s + sum(
        _exchange_s(nbytes, size, index, topology, calibration)
        for index, size in enumerate(extent)
        if size > 1
    )


def send_s(nbytes: float, level: int, topology: Topology, calibration: Calibration) -> float:
    """Seconds of one message of `nbytes` to a device that `level` is the first to join."""
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
    """Whether NCCL does it: it has no levels, but rings and trees through all devices at once."""
    outermost = max(index for index, size in enumerate(extent) if size > 1)
    return topology.chip.platform == "gpu" and topology.levels[outermost].name in NETWORKS


def _ring_through_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """One reduce-scatter or all-gather by rings, each of which leaves a host by another device.

    All links work at the same time, so the slowest counts. Of the messages, as many as there are
    hosts go between them (NCCL, src/graph/tuning.cc).
    """
    ranks, hosts = prod(extent), _hosts(extent, topology)
    outside = min(hosts, ranks - 1)
    near_s, far_s = _latencies(extent, topology)
    messages_s = (ranks - 1 - outside) * near_s + outside * far_s
    share = (ranks - 1) / ranks * nbytes
    return messages_s + share / _slowest(extent, topology, calibration)


def _trees_s(nbytes: float, extent: Extent, topology: Topology, calibration: Calibration) -> float:
    """All-reduce by two trees of hosts, each a chain within: fewer messages, all of the bytes.

    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", 2009; in NCCL since 2.4.
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
    """Of a message within a host and between two, in seconds."""
    crossed = [level for size, level in zip(extent, topology.levels, strict=True) if size > 1]
    near = [level.latency_s for level in crossed if level.name not in NETWORKS]
    return max(near, default=0.0), crossed[-1].latency_s


def _slowest(extent: Extent, topology: Topology, calibration: Calibration) -> float:
    """Bytes a second of the slowest level, of what the devices of a group send over it together."""
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
    """One reduce-scatter or all-gather of `nbytes` among `size` of one level, as a ring.

    Where links join neighbours, half goes each way around; a line has no other way around.
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
    """Of the bytes of one device, how much the busiest link of a ring or a line carries one way.

    Half of the devices send to the other half over the link in the middle, of which a ring has two.
    """
    half = size // 2 * -(-size // 2) / size
    return half / 2 if wraps else half


def _bandwidth(link: Level, calibration: Calibration) -> float:
    between = link.name in NETWORKS
    efficiency = calibration.network_efficiency if between else calibration.link_efficiency
    return link.bytes_per_s * efficiency
