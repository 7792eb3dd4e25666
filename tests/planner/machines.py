"""Hardware shared by the tests of the cost model."""

from __future__ import annotations

from benchmarks.planner_rows import A100
from nbdist.records.topology import Chip, Level, Topology

HOST = Level(name="host", size=8, latency_s=3.4e-6, bytes_per_s=300e9)
NETWORK = Level(name="network", size=64, latency_s=14e-6, bytes_per_s=25e9)
HOSTS = Topology(chip=A100, levels=(HOST, NETWORK))

V5E = Chip(
    name="TPU v5e",
    platform="tpu",
    memory_bytes=16 * 2**30,
    flops={"bfloat16": 197e12},
    bytes_per_s=0.81e12,
    source="jax-ml/scaling-book tpus.md",
)
RING = Level(name="ICI x", size=16, latency_s=1e-6, bytes_per_s=45e9, ring=True)
TORUS = Topology(chip=V5E, levels=(RING, RING))
