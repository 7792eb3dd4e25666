"""JAX backend across real engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nbdist
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Start two processes with two virtual devices each."""
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        yield running


def test_one_mesh_spans_all_processes(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        "import jax\n"
        "(jax.process_count(), jax.process_index(), dict(mesh.shape), jax.device_count())"
    )
    assert run.results == {rank: f"(2, {rank}, {{'data': 4}}, 4)" for rank in range(2)}


def test_global_sum_includes_every_rank(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        "import numpy as np, jax.numpy as jnp\n"
        "rows = jax.NamedSharding(mesh, jax.P('data'))\n"
        "x = jax.make_array_from_process_local_data(rows, np.full(2, rank + 1.0))\n"
        "float(jax.jit(jnp.sum, out_shardings=jax.P())(x))"
    )
    assert set(run.results.values()) == {"6.0"}


def test_mesh_is_set_inside_the_cell(cluster: nbdist.Cluster) -> None:
    run = cluster.run("jax.sharding.get_abstract_mesh().shape_tuple")
    assert set(run.results.values()) == {"(('data', 4),)"}


def test_many_steps_in_flight_do_not_deadlock(cluster: nbdist.Cluster) -> None:
    """With only one thread per device, hundreds of all-reduces in flight hang forever."""
    run = cluster.run(
        "f = jax.jit(lambda x: x + jnp.sum(x), out_shardings=rows)\n"
        "y = x\nfor _ in range(300):\n    y = f(y) / 7\n"
        "y.block_until_ready().shape"
    )
    assert set(run.results.values()) == {"(4,)"}


def test_thread_of_gloo_does_not_preempt_other_threads(cluster: nbdist.Cluster) -> None:
    """Otherwise it polls its connections while the thread with the lock waits for the processor."""
    run = cluster.run(
        "import os\n"
        "threads = map(int, os.listdir('/proc/self/task'))\n"
        "sum(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in threads)"
    )
    assert set(run.results.values()) == {"1"}


def test_no_rank_hosts_the_coordination_service(cluster: nbdist.Cluster) -> None:
    run = cluster.run("from jax._src import distributed\ndistributed.global_state.service is None")
    assert set(run.results.values()) == {"True"}
    assert any(
        name.startswith("coordinator")
        for name in cluster._worker_group.engines.fleet.home.state.pids()
    )


def test_preemption_notifier_is_disabled(cluster: nbdist.Cluster) -> None:
    run = cluster.run("jax.config.jax_enable_preemption_service")
    assert set(run.results.values()) == {"False"}


def test_keras_on_jax_reports_its_epochs(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train on one rank without the mesh: nbdist still reports `fit`."""
    run = cluster.run(
        "import keras\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile(optimizer='sgd', loss='mse')\n"
        "history = model.fit(np.ones((8, 2)), np.full((8, 1), rank), epochs=2)\n"
        "keras.backend.backend()",
        ranks="1",
    )
    assert set(run.results.values()) == {"'jax'"}
    assert [m.epoch for m in run.metrics] == [1, 2]
    assert run.metrics[0].own["loss"] == run.metrics[0].shared["loss"]


def test_memory_of_devices_with_counters_is_measured(cluster: nbdist.Cluster) -> None:
    """CPUs do not count memory. The numbers of the GPU are invented."""
    run = cluster.run(
        "from types import SimpleNamespace\n"
        "from unittest import mock\n"
        "from nbdist.worker.runtime import context\n"
        "stated = [None, {'bytes_in_use': 7, 'bytes_limit': 9}]\n"
        "devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in stated]\n"
        "plain = context.current().memory.device_bytes()\n"
        "with mock.patch('nbdist.worker.jax.backend.jax.local_devices', return_value=devices):\n"
        "    counted = context.current().memory.device_bytes()\n"
        "plain, counted"
    )
    assert set(run.results.values()) == {"([], [7])"}


WITHOUT_NAMES = """
import jax
from jax._src import compilation_cache_interface, sharding_impls
from jax._src.interpreters import batching
del compilation_cache_interface.CacheInterface, sharding_impls._internal_use_concrete_mesh
del batching.BatchTracer
import nbdist.worker.jax.backend as backend
backend._apply_optional_patches("compiled")
import nbdist.worker.jax.step.step
"""


@pytest.mark.processes
def test_missing_names_refuse_only_their_patches(tmp_path: Path) -> None:
    """The strategy still starts, and step cells are refused for the names that they need."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(nbdist.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *warnings, error = [line for line in done.stderr.splitlines() if "which nbdist needs" in line]
    assert [text.partition(", because")[0] for text in warnings] == [
        "replaced workers compile their programs again",
        "callbacks run on rank 0 only",
    ]
    assert error.startswith("nbdist.errors.LibraryVersionError: JAX ")
