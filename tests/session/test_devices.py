"""Devices of a cluster: their display, their measurement, and plans with the measured values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.records import StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP = "loss = (batch @ w).mean()\nw = w + 1"
SETUP = "import numpy as np, jax.numpy as jnp\nw = jnp.ones((64, 64))\nxs = np.ones((32, 64), 'f')"
PLUGIN = """
import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax, xla_client

def initialize():
    _jax.Device.device_kind = property(lambda device: "Zorn 1")
    xla_bridge.register_backend_factory("zorn", client, priority=500, fail_quietly=False)

def client():
    shared = distributed.global_state
    return xla_client.make_cpu_client(
        asynchronous=True,
        distributed_client=shared.client,
        node_id=shared.process_id,
        num_nodes=shared.num_processes,
        collectives=_jax.make_gloo_tcp_collectives(distributed_client=shared.client),
    )
"""
"""Platform of a third party, from JAX's point of view. Its devices are CPUs with another name."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        yield running


def step(cluster: nbdist.Cluster) -> nbdist.Run:
    cluster.run(SETUP, strategy="pjrt")
    return cluster.run(STEP, strategy="pjrt", step=StepOptions(data="xs", batch=16))


def test_devices_are_shown_with_their_links(cluster: nbdist.Cluster) -> None:
    picture = cluster.devices()
    text = "\n".join(picture.lines())
    assert text.startswith("nbdist: 4 devices of 2 workers on 1 host\n")
    assert text.count("from tables") == 2
    assert "run %dist_devices --bench to measure the devices" in text
    assert "<table" in picture.html()
    assert picture.bench is None


def test_plans_use_measured_values(cluster: nbdist.Cluster) -> None:
    picture = cluster.devices(bench=True)
    bench = picture.bench
    assert bench is not None
    assert bench.devices == 4
    assert {product.dtype for product in bench.products} == {"float32", "bfloat16", "float16"}
    assert all(product.flops > 1e6 for product in bench.products)
    assert 1e8 < bench.bytes_per_s < 1e13
    assert bench.links.keys() == {"process", "host"}
    for link in bench.links.values():
        assert 0 < link.latency_s < 1
        assert 1e5 < link.bytes_per_s < 1e13
    text = "\n".join(picture.lines())
    assert "GFLOP/s" in text
    assert "from tables" not in text
    plan = step(cluster).plan
    assert plan is not None
    assert not [note for note in plan.notes if "not measured" in note]
    cluster.restart()
    assert cluster.devices().bench == bench


@pytest.mark.full  # imports TensorFlow once more
def test_devices_without_jax_are_shown_and_not_measured() -> None:
    with clusters.cluster(hosts=1, framework="tensorflow") as running:
        text = "\n".join(running.devices().lines())
        assert text.startswith("nbdist: 1 device of 1 worker on 1 host\n")
        assert "from tables" not in text
        with pytest.raises(UsageError, match="--bench measures JAX's devices"):
            running.devices(bench=True)


@pytest.mark.full  # its environment needs another fork server
def test_devices_of_an_unknown_plugin_are_measured_first(tmp_path: Path) -> None:
    package = tmp_path / "jax_plugins" / "zorn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLUGIN)
    env = {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "zorn"}
    with nbdist.Cluster(hosts=2, framework="jax", env=env) as running:
        plan = step(running).plan
        assert plan is not None
        assert "Zorn 1" in plan.on
        assert "measured by microbenchmarks" in "\n".join(running.devices().lines())
