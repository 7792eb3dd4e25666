"""Conversion of benchmark results to the planner's figures, to which efficiencies apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.planner.cost.collectives import NETWORKS
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.lookup import find, probed
from nbdist.records import Link

if TYPE_CHECKING:
    from nbdist.records import Bench, Chip, LocalDevices

_SOURCE = "measured by %dist_devices --bench"


def benched_chip(bench: Bench, own: LocalDevices) -> Chip:
    """Return a chip for which the planner predicts the measured times of products and copies.

    Args:
        bench: the results; its links are ignored.
        own: the devices of a process.

    Raises:
        PlanError: the chip is not in the catalog, and the results are too few.
    """
    best = {
        dtype: max(p.flops for p in bench.products if p.dtype == dtype)
        for dtype in sorted({product.dtype for product in bench.products})
    }
    known = find(own.kind)
    if known is None:
        memory = own.memory_bytes or 0
        known = probed(own.kind, own.platform, memory, best, bench.bytes_per_s)
    reaches = calibration_of(known)
    flops = {dtype: rate / reaches.matmul_ceiling for dtype, rate in best.items()}
    if "tensorfloat32" in known.flops and "float32" in flops:
        flops["tensorfloat32"] = flops.pop("float32")  # the type in which float32 products run
    return msgspec.structs.replace(
        known,
        flops={**known.flops, **flops},
        bytes_per_s=bench.bytes_per_s / reaches.memory_efficiency,
        source=f"products and copies {_SOURCE}; the rest {known.source}",
    )


def benched_links(bench: Bench, chip: Chip) -> dict[str, Link]:
    """Return links for which the planner predicts the measured times of collectives, by level."""
    reaches = calibration_of(chip)
    links = {}
    for name, link in bench.links.items():
        part = reaches.network_efficiency if name in NETWORKS else reaches.link_efficiency
        links[name] = Link(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s / part)
    return links
