"""Methods of PjRTStrategy on real engines; the same function under MirroredStrategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Start two processes with two virtual devices each."""
    with clusters.cluster(hosts=2, framework="jax", devices_per_host=2) as running:
        running.run("import jax, jax.numpy as jnp, numpy as np, nbdist")
        yield running


def run_without_cluster(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process without a cluster."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


def outcome_on_all_ranks(cluster: nbdist.Cluster, code: str) -> Any:
    """Return `outcome`; check that it is the same on every rank."""
    cluster.run(textwrap.dedent(code))
    first, *others = [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]
    for other in others:
        assert json.dumps(other) == json.dumps(first)
    return first


USER_CODE = """
outcome = []
batches = strategy.experimental_distribute_dataset(DATA)

def step(batch):
    x, y = batch
    return {"errors": (x[:, 0] - x[:, 1] * y) ** 2}

for batch in batches:
    result = strategy.run(step, args=(batch,))
    outcome.append(float(strategy.reduce("SUM", result["errors"], axis=0)))
    outcome.append(float(strategy.reduce("MEAN", result["errors"], axis=0)))

def double(value, *, offset):
    return value * 2 + offset

doubled = strategy.run(double, args=(three,), kwargs={"offset": 1})
outcome.append(float(strategy.reduce("SUM", doubled, axis=None)))
outcome.append(float(strategy.reduce("MEAN", doubled, axis=None)))
outcome.append(len(strategy.experimental_local_results(three)))
outcome.append(strategy.num_replicas_in_sync)
"""
"""User code that names no framework."""

ARRAYS = """
import numpy as np
x = np.arange(44, dtype="float32").reshape(22, 2)
y = np.ones(22, "float32")
"""


@pytest.mark.full  # other tests check the same numbers
def test_code_for_mirrored_strategy_gives_same_results(cluster: nbdist.Cluster) -> None:
    """22 samples in batches of 8 on 4 replicas: the last batch has 6."""
    tensorflow = f"""
import json, tensorflow as tf
{ARRAYS}
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
strategy = tf.distribute.MirroredStrategy([f"CPU:{{i}}" for i in range(4)])
three = tf.constant(3.0)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
{USER_CODE.replace("DATA", "data")}
print(json.dumps(outcome))
"""
    done = run_without_cluster(tensorflow)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = outcome_on_all_ranks(
        cluster,
        ARRAYS
        + "three = jnp.asarray(3.0)\nbatches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]\n"
        + USER_CODE.replace("DATA", "batches"),
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_run_passes_each_replica_its_part(cluster: nbdist.Cluster) -> None:
    """Include rows of a batch, an earlier result of run, and other arguments unchanged."""
    outcome = outcome_on_all_ranks(
        cluster,
        """
        rows = next(iter(strategy.experimental_distribute_dataset([np.arange(8.0)])))
        first = strategy.run(lambda x: x[0], args=(rows,))
        def second(own, same, number, *, name):
            assert name == "n" and own.shape == ()
            return own + same.sum() + number + jax.lax.psum(own, "data")
        result = strategy.run(second, (first, np.ones(3), 10), {"name": "n"})
        outcome = [float(strategy.reduce("SUM", first, axis=None)),
                   float(strategy.reduce("MEAN", result, axis=None)),
                   len(strategy.experimental_local_results(result))]
        own = [float(v) for v in strategy.experimental_local_results(result)]
        """,
    )
    assert outcome == [12.0, 28.0, 2]
    pulled = cluster.pull(["own"])
    assert [pulled[0]["own"], pulled[1]["own"]] == [[25.0, 27.0], [29.0, 31.0]]
    assert outcome_on_all_ranks(
        cluster, "outcome = list(strategy.experimental_local_results(5))"
    ) == [5]


def test_gradient_is_per_replica(cluster: nbdist.Cluster) -> None:
    """With shard_map's checks, JAX would sum gradients of closed-over parameters."""
    outcome = outcome_on_all_ranks(
        cluster,
        """
        w = jnp.ones(())
        def grads(x):
            return jax.grad(lambda w: jnp.mean(w * x))(w)
        g = strategy.run(grads, (rows,))
        outcome = [float(strategy.reduce(op, g, None)) for op in ("SUM", "MEAN")]
        """,
    )
    assert outcome == [14.0, 3.5]


def test_changed_globals_are_recompiled(cluster: nbdist.Cluster) -> None:
    outcome = outcome_on_all_ranks(
        cluster,
        """
        scale = 1.0
        def inner(x):
            return scale * x
        def f(x):
            return jnp.sum(inner(x))
        outcome = []
        for scale in (1.0, 2.0, 2.0, 3.0):
            outcome.append(float(strategy.reduce("SUM", strategy.run(f, (rows,)), axis=None)))
        outcome.append(len(strategy._runner._programs) <= 16)
        """,
    )
    assert outcome == [28.0, 56.0, 56.0, 84.0, True]


def test_same_function_is_compiled_once(cluster: nbdist.Cluster) -> None:
    outcome = outcome_on_all_ranks(
        cluster,
        """
        traced = []
        def f(x, i):
            traced.append(1)
            return x.sum() + i
        for i in range(5):
            result = strategy.run(f, (rows, i))
        outcome = [len(traced), float(strategy.reduce("MEAN", result, axis=None))]
        """,
    )
    assert outcome == [1, 11.0]


def test_indivisible_batch_loses_no_row(cluster: nbdist.Cluster) -> None:
    outcome = outcome_on_all_ranks(
        cluster,
        """
        seven = next(iter(strategy.experimental_distribute_dataset([np.arange(7.0)])))
        result = strategy.run(lambda x: {"rows": x, "total": x.sum()}, (seven,))
        outcome = [float(strategy.reduce("SUM", result["total"], axis=None)),
                   float(strategy.reduce("MEAN", result["rows"], axis=0)),
                   float(strategy.reduce("MEAN", result["total"], axis=None))]
        """,
    )
    assert outcome == [21.0, 3.0, 5.25]


def test_shards_of_processes_form_global_batches(cluster: nbdist.Cluster) -> None:
    """Rank 1 has fewer rows: none are dropped; jitted functions accept the arrays."""
    outcome = outcome_on_all_ranks(
        cluster,
        """
        seen = []
        def own(ctx):
            seen.append((ctx.num_input_pipelines, ctx.input_pipeline_id,
                         ctx.num_replicas_in_sync, ctx.get_per_replica_batch_size(8)))
            for i in range(7 - ctx.input_pipeline_id):
                yield np.full(2, 10.0 * ctx.input_pipeline_id + i, "float32")
        dataset = strategy.distribute_datasets_from_function(own)
        outcome = []
        for _ in range(2):
            totals = [strategy.run(lambda x: x.sum(), (batch,)) for batch in dataset]
            outcome.append([float(strategy.reduce("SUM", t, axis=None)) for t in totals])
        first = next(iter(dataset))
        outcome.append(float(jax.jit(lambda x: x.mean())(first)))
        outcome.append(list(first.shape))
        """,
    )
    totals = [[2 * (0 + 1 + 10 + 11), 2 * (2 + 3 + 12 + 13), 2 * (4 + 5 + 14 + 15), 2 * 6]] * 2
    assert outcome[:2] == totals
    assert outcome[2:] == [5.5, [8]]
    seen = [objects["seen"][0] for objects in cluster.pull(["seen"]).values()]
    assert seen == [(2, 0, 4, 2), (2, 1, 4, 2)]


UNSUPPORTED = [
    ("strategy.distribute_datasets_from_function(lambda ctx: 7)", "expected a dataset, got int"),
    ("strategy.experimental_distribute_dataset((rows, rows))", "expected a dataset, got tuple"),
    ("d = strategy.experimental_distribute_dataset(iter([np.ones(8)]))\nlist(d), list(d)",
     "exhausted after one pass"),
    ("strategy.distribute_datasets_from_function(lambda c: c.get_per_replica_batch_size(7))",
     "7 samples cannot be split evenly over 4 replicas: choose a multiple of 4"),
    ("strategy.reduce('MAX', strategy.run(lambda: 1), None)", "choose 'SUM' or 'MEAN'"),
    ("strategy.reduce('SUM', 1.0, None)", "is not per replica"),
    ("jax.jit(lambda x: strategy.run(lambda v: v, (x,)))(np.ones(4))", "inside jax.jit"),
    ("strategy.run(lambda x: jax.lax.psum(x.sum(), 'data'), (seven,))", "uses a collective"),
    ("strategy.reduce('SUM', strategy.run(lambda x: x, (seven,)), None)", "different shapes"),
    ("nbdist.PjRTStrategy((4, 2))", "4 hosts with 2 devices each, but 2 processes"),
    ("nbdist.PjRTStrategy({'hosts': 2, 'devices_per_host': 1})", "2 hosts with 1 devices each"),
    ("nbdist.PjRTStrategy('h')", "specifies no hosts"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message"), UNSUPPORTED)
def test_unsupported_calls_are_refused(cluster: nbdist.Cluster, code: str, message: str) -> None:
    cluster.run(
        "rows = next(iter(strategy.experimental_distribute_dataset([np.arange(8.0)])))\n"
        "seven = next(iter(strategy.experimental_distribute_dataset([np.arange(7.0)])))"
    )
    with pytest.raises(nbdist.CellError, match=message):
        cluster.run(code)


def test_matching_resolver_is_accepted(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        "nbdist.PjRTStrategy((2, 2)).mesh == strategy.mesh, "
        "nbdist.PjRTStrategy({'hosts': 2, 'devices_per_host': 2}).num_replicas_in_sync"
    )
    assert set(run.results.values()) == {"(True, 4)"}


@pytest.mark.full  # rare
def test_tensorflow_resolver_is_accepted(cluster: nbdist.Cluster) -> None:
    code = (
        "import tensorflow as tf\n"
        "spec = tf.train.ClusterSpec({'worker': ['a:1', 'b:2']})\n"
        "R = tf.distribute.cluster_resolver.SimpleClusterResolver\n"
        "nbdist.PjRTStrategy(R(spec, task_type='worker', task_id=RANK)).num_replicas_in_sync"
    )
    run = cluster.run(code.replace("RANK", "rank"))
    assert set(run.results.values()) == {"4"}
    with pytest.raises(nbdist.CellError, match=r"2 workers and index (\d), .* has index (?!\1)"):
        cluster.run(code.replace("RANK", "1 - rank"))


@pytest.mark.full  # rare
def test_tensorflow_reduce_op_is_accepted(cluster: nbdist.Cluster) -> None:
    code = "import tensorflow as tf\nresult = strategy.run(lambda: 2.0)\n"
    code += "float(strategy.reduce(tf.distribute.ReduceOp.SUM, result, axis=None))"
    assert set(cluster.run(code).results.values()) == {"8.0"}


@pytest.mark.processes
def test_plain_script_uses_its_own_devices() -> None:
    done = run_without_cluster(
        """
        import sys, numpy as np, nbdist
        strategy = nbdist.PjRTStrategy()
        with strategy.scope():
            x, = strategy.experimental_distribute_dataset([np.arange(6.0)])
            total = strategy.reduce("SUM", strategy.run(lambda x: x.sum(), (x,)), axis=None)
        print(strategy.num_replicas_in_sync, float(total), "tensorflow" in sys.modules)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "15.0", "False"]


@pytest.mark.processes
@pytest.mark.full  # test_fit.py trains models
def test_keras_in_a_plain_script_needs_no_tensorflow() -> None:
    done = run_without_cluster(
        """
        import sys, nbdist
        strategy = nbdist.PjRTStrategy()
        with strategy.scope():
            import keras, numpy as np
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.ones((7, 2)), np.ones(7), epochs=2, verbose=0)
            shape = model.predict(np.ones((7, 2)), verbose=0).shape
            distribution = keras.distribution.distribution()
            parallel = isinstance(distribution, keras.distribution.DataParallel)
        print(shape, parallel, keras.distribution.distribution(), "tensorflow" in sys.modules)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        KERAS_BACKEND="jax",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "(7, 1) True None False"
