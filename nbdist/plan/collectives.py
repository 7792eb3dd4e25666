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
    from nbdist.plan.calibration import Calibration
    from nbdist.records.topology import Extent, Level, Topology


def all_reduce_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Seconds until every device of the axis has the sum of arrays of `nbytes`, one on each.

    A ring carries 2 (n - 1)/n of the bytes in 2 (n - 1) messages (Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms", JPDC 2009). Over levels: reduce-scatter inside, all-reduce of
    the share outside, all-gather inside (Goyal et al., arXiv:1706.02677, section 4; NVIDIA, "Doubling
    all2all Performance with NCCL 2.12", for the rail that each device has of its own).
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
    travels n/4 links on average ("How to Scale Your Model", section "Sharded matrices",
    jax-ml.github.io/scaling-book). Levels are passed one after the other, with all bytes.
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
    return (
        calibration.collective_s
        + link.latency_s
        + nbytes / _bandwidth(level, topology, calibration)
    )


def _reduce_levels_s(
    nbytes: float, extent: Extent, topology: Topology, calibration: Calibration
) -> float:
    """Down through the levels and up again; the outermost is an all-reduce by itself."""
    crossed = [index for index, size in enumerate(extent) if size > 1]
    seconds, share = 0.0, nbytes
    for index in crossed[:-1]:
        seconds += 2 * _phase_s(share, extent[index], index, topology, calibration)
        share /= extent[index]
    return seconds + _outermost_s(share, extent[crossed[-1]], crossed[-1], topology, calibration)


def _outermost_s(
    nbytes: float, size: int, index: int, topology: Topology, calibration: Calibration
) -> float:
    """A ring, or between hosts a pair of trees where fewer messages are worth more bytes.

    Double binary trees: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", 2009; in NCCL since 2.4, between hosts only.
    """
    link = topology.levels[index]
    ring_s = 2 * _phase_s(nbytes, size, index, topology, calibration)
    if index == 0 or link.ring:
        return ring_s
    tree_s = 2 * (
        ceil(log2(size)) * link.latency_s + nbytes / _bandwidth(index, topology, calibration)
    )
    return min(ring_s, tree_s)


def _phases_s(nbytes: float, extent: Extent, topology: Topology, calibration: Calibration) -> float:
    seconds, share = 0.0, nbytes
    for index, size in enumerate(extent):
        seconds += _phase_s(share, size, index, topology, calibration)
        share /= size
    return seconds


def _phase_s(
    nbytes: float, size: int, index: int, topology: Topology, calibration: Calibration
) -> float:
    """One reduce-scatter or all-gather of `nbytes` among `size` of one level, as a ring."""
    bandwidth = _bandwidth(index, topology, calibration)
    return (size - 1) * (topology.levels[index].latency_s + nbytes / size / bandwidth)


def _exchange_s(
    nbytes: float, size: int, index: int, topology: Topology, calibration: Calibration
) -> float:
    link = topology.levels[index]
    messages_s = (size - 1) * link.latency_s
    travelled = _ring_travel(size) if link.ring else (size - 1) / size
    return messages_s + nbytes * travelled / _bandwidth(index, topology, calibration)


def _ring_travel(size: int) -> float:
    """Links that a part passes on average on a ring of `size`, the shorter way around."""
    return sum(min(hops, size - hops) for hops in range(size)) / size


def _bandwidth(index: int, topology: Topology, calibration: Calibration) -> float:
    link: Level = topology.levels[index]
    within = index == 0 or link.ring
    return link.bytes_per_s * (
        calibration.link_efficiency if within else calibration.network_efficiency
    )
