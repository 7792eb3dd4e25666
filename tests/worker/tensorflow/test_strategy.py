"""TensorFlow on real engines: wiring, and Keras compared with one process."""

from __future__ import annotations

import json
import socket
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq

import nbdist
from nbdist.cluster.collectives import mirrored_wiring
from tests import clusters
from tests.keras_programs import ADAM, FIT, MODEL, OUTCOME
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIMIZERS = {
    "sgd": "keras.optimizers.SGD(0.1, momentum=0.9)",
    "adam": ADAM,
}
"""Optimizers by name."""


def training(optimizer: str) -> str:
    """Return a training with normalization, dropout and a last batch of one sample."""
    return MODEL.replace(ADAM, OPTIMIZERS[optimizer]) + FIT


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=3, framework="tensorflow") as running:
        yield running


OWN_SAMPLES = (10 * 32 + 1, 10 * 32, 10 * 32)
"""Training whose last batch has one sample. Every replica computes it, and rank 0 counts it."""


def assert_close(ours: Any, reference: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.full  # keras/test_fit.py compares fits on two ranks
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_keras_gives_the_results_of_one_process(cluster: nbdist.Cluster, name: str) -> None:
    code = training(name) + OUTCOME
    reference = plainly({name: code}, "tensorflow", "sklearn.datasets")[name]
    cluster.run(code)
    outcomes = [objects["outcome"] for objects in cluster.pull(["outcome"]).values()]
    for outcome in outcomes:
        for metric, values in reference["history"].items():
            assert_close(outcome["history"][metric], values)
        assert_close(outcome["evaluate"], reference["evaluate"])
        assert_close(outcome["predict"], reference["predict"])
        for ours, theirs in zip(outcome["weights"], reference["weights"], strict=True):
            assert_close(ours, theirs)


@pytest.mark.full  # the tour notebook tests the same
def test_fit_shows_the_loss_of_each_worker_per_epoch(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code = training("sgd").replace("verbose=0, ", "")
    run = cluster.run(f"{code}\nhistory = history.history")
    captured = capsys.readouterr()
    shown = [line for line in captured.out.splitlines() if "  loss" in line]
    assert [line.split()[1] for line in shown[:3]] == ["1", "2", "3"]
    history = cluster.pull(["history"], ranks="0")[0]["history"]
    for epoch in (1, 2, 3):
        of_epoch = sorted((m for m in run.metrics if m.epoch == epoch), key=lambda m: m.rank)
        own = [m.own["loss"] for m in of_epoch]
        assert len(set(own)) == 3, "ranks saw the same samples"
        assert_close(np.average(own, weights=OWN_SAMPLES), history["loss"][epoch - 1])
        assert {m.shared["loss"] for m in of_epoch} == {history["loss"][epoch - 1]}
        assert "val_accuracy" in of_epoch[0].shared


@pytest.mark.full
def test_keras_cannot_fit_without_the_patch(cluster: nbdist.Cluster) -> None:
    """If this fails, Keras has fixed the issue: remove the patch."""
    undo = (
        "from nbdist.worker.tensorflow.keras import fit_patch as p\n"
        "p.keras_trainer.TFEpochIterator.__init__ = p._init_upstream\n"
        "p.keras_trainer.TensorFlowTrainer._maybe_symbolic_build = p._build_upstream\n"
        "for kind, make in p._make_upstream.items():\n"
        "    setattr(p.keras_trainer.TensorFlowTrainer, f'make_{kind}_function', make)\n"
    )
    cluster.run(undo)
    try:
        with pytest.raises(nbdist.CellError):
            cluster.run(training("sgd"))
    finally:
        cluster.restart()


def test_other_keras_version_is_not_patched(cluster: nbdist.Cluster) -> None:
    run = cluster.run(
        "from nbdist.worker.tensorflow.keras import fit_patch as p\n"
        "p.keras_trainer.TFEpochIterator.__init__ = p._init_upstream\n"
        "from nbdist.private_api.tested_versions import TESTED\n"
        "kept, TESTED['Keras'] = TESTED['Keras'], ('9.9.',)\n"
        "p.apply()\n"
        "untouched = p.keras_trainer.TFEpochIterator.__init__ is p._init_upstream\n"
        "TESTED['Keras'] = kept\np.apply()\nuntouched"
    )
    assert set(run.results.values()) == {"True"}


def test_training_with_an_untested_keras_is_refused(cluster: nbdist.Cluster) -> None:
    """Another version may average batches differently: no numbers are better than other ones."""
    run = cluster.run("""
import keras
from nbdist.errors import StrategyError
from nbdist.private_api import keras as private
from nbdist.worker.keras import untested
from nbdist.private_api.tested_versions import TESTED
kept, TESTED["Keras"] = TESTED["Keras"], ("9.8.", "9.9.")
untested.accepts.__wrapped__(keras, private.FIT)
refused = []
for name in untested.METHODS:
    try:
        getattr(keras.Sequential(), name)([[1.0]])
    except StrategyError as error:
        refused.append(str(error))
    delattr(keras.Model, name)
TESTED["Keras"] = kept
f"{len(refused)} {refused[0]}"
""")
    (shown,) = set(run.results.values())
    assert "6 nbdist supports `fit`, `evaluate` and `predict` on workers with Keras 9.8.x" in shown
    assert "keras==9.9.*" in shown


def test_tf_config_lists_workers_with_chief_first(cluster: nbdist.Cluster) -> None:
    cluster.run("import os, json\nconfig = json.loads(os.environ['TF_CONFIG'])")
    configs = [objects["config"] for objects in cluster.pull(["config"]).values()]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1
    assert len(set(configs[0]["cluster"]["worker"])) == 3
    run = cluster.run("strategy.cluster_resolver.task_id == 0")
    assert run.results == {0: "True", 1: "False", 2: "False"}


def test_cell_runs_in_the_scope_of_its_strategy(cluster: nbdist.Cluster) -> None:
    cell = "import tensorflow as tf\ntf.distribute.get_strategy() is strategy"
    assert set(cluster.run(cell).results.values()) == {"True"}
    assert set(cluster.run(cell, ranks="0").results.values()) == {"False"}


SCALARS = """
import tensorflow as tf, keras
flag, count, rate = tf.Variable(False), tf.Variable(3), keras.optimizers.SGD(0.5).learning_rate
bool(flag), int(count), float(count), complex(count), float(rate), 1 if flag else 0
"""


def test_variables_convert_to_numbers(cluster: nbdist.Cluster) -> None:
    run = cluster.run(SCALARS)
    assert set(run.results.values()) == {"(False, 3, 3.0, (3+0j), 0.5, 0)"}


ARRAYS = """
import numpy as np, tensorflow as tf
scale, weights = tf.Variable(0.0), tf.Variable([[1.0, 2.0]])
np.exp(scale).tolist(), np.asarray(weights, "float64").tolist(), np.array(scale).dtype.name
"""


def test_variables_convert_to_arrays(cluster: nbdist.Cluster) -> None:
    run = cluster.run(ARRAYS)
    assert set(run.results.values()) == {"(1.0, [[1.0, 2.0]], 'float32')"}


@pytest.mark.full
def test_tensorflow_still_needs_its_patch(cluster: nbdist.Cluster) -> None:
    """If this fails, TensorFlow converts a strategy's variables itself: remove the patch."""
    run = cluster.run(
        "import tensorflow as tf\nfrom tensorflow.python.distribute import values\n"
        "own = ('__array__', '__bool__', '__int__', '__float__', '__complex__')\n"
        "kept = {name: getattr(values.DistributedVariable, name) for name in own}\n"
        "for name in own:\n    delattr(values.DistributedVariable, name)\n"
        "needed = bool(tf.Variable(False))\n"
        "for name in own:\n    setattr(values.DistributedVariable, name, kept[name])\n"
        "needed"
    )
    assert set(run.results.values()) == {"True"}


def test_variables_of_other_tensorflow_are_not_patched(cluster: nbdist.Cluster) -> None:
    run = cluster.run("""
from tensorflow.python.distribute import values
from nbdist.private_api.tested_versions import TESTED
from nbdist.worker.tensorflow import strategy as backend
before, values.DistributedVariable.__bool__ = values.DistributedVariable.__bool__, None
kept, TESTED["TensorFlow"] = TESTED["TensorFlow"], ("9.9.",)
backend._apply_optional_patches()
left = values.DistributedVariable.__bool__ is None
TESTED["TensorFlow"], values.DistributedVariable.__bool__ = kept, before
left
""")
    assert set(run.results.values()) == {"True"}


def test_gpu_memory_is_measured(cluster: nbdist.Cluster) -> None:
    """TensorFlow does not count CPU memory. The numbers of the GPUs are invented."""
    run = cluster.run(
        "from unittest import mock\n"
        "from nbdist.worker.runtime import context as state\n"
        "plain = state.current().memory.device_bytes()\n"
        "reported = {'GPU:0': {'current': 7, 'peak': 9}, 'GPU:1': {'current': 8, 'peak': 9}}\n"
        "with mock.patch('tensorflow.config.list_physical_devices', return_value=[*reported]), \\\n"
        "     mock.patch('tensorflow.config.experimental.get_memory_info', reported.__getitem__):\n"
        "    counted = state.current().memory.device_bytes()\n"
        "plain, counted"
    )
    assert set(run.results.values()) == {"([], [7, 8])"}


def test_reserved_port_cannot_be_bound_by_others(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "from nbdist.worker.tensorflow import strategy as mirrored\nport = mirrored.reserve_port()",
        ranks="0",
    )
    port = cluster.pull(["port"], ranks="0")[0]["port"]
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    cluster.run("mirrored._reserved_ports.pop().close()", ranks="0")


LONE_RANK = """
import gc, weakref
import numpy as np
import tensorflow as tf
from nbdist.records import MirroredWiring, SocketAddress, WorkerIdentity
from nbdist.worker.tensorflow import strategy as mirrored
from nbdist.worker.runtime import context as state
from tests import clusters
nowhere = SocketAddress(url="tcp://127.0.0.1:1", server_key=KEY)
state._worker = state.Worker(
    WorkerIdentity(rank=0, world_size=1, stream=nowhere, dispatch=nowhere))
def build():
    config = CONFIG % mirrored.reserve_port()
    return mirrored.build(MirroredWiring(tf_config=config, communication="auto"))[0].platform
"""
BUILD_AFTER_AN_OP = """
tf.constant(1) + 1
outcome = build()
"""
REBUILD = """
from nbdist.worker.tensorflow.runtime.rank_gather import gather_over
build()
previous = weakref.ref(state.current().strategies["mirrored"])
gathered = gather_over(previous())(np.array([3, 4], np.int32)).tolist()
same = gather_over(previous()) is gather_over(previous())
build()
gc.collect()
outcome = gathered, same, previous() is None
"""


def lone_rank(code: str) -> str:
    """Return the program of a process that is the only rank."""
    key, _ = zmq.curve_keypair()
    config = json.dumps(
        {"cluster": {"worker": ["127.0.0.1:%d"]}, "task": {"type": "worker", "index": 0}}
    )
    return f"KEY = {key!r}\nCONFIG = {config!r}\n{LONE_RANK}{code}"


@pytest.mark.processes
def test_strategy_is_freed_when_another_is_built() -> None:
    """It is freed even if its ranks have gathered numbers."""
    outcome = plainly({"one": lone_rank(REBUILD)}, "tensorflow", "keras")["one"]
    assert outcome == [[[3, 4]], True, True]


@pytest.mark.full
def test_operation_before_the_strategy_is_allowed() -> None:
    code = lone_rank(BUILD_AFTER_AN_OP)
    unpatched = code.replace(
        "tf.constant(1) + 1", "mirrored._context_exists = bool; tf.constant(1)"
    )
    unpatched = f"try:\n{textwrap.indent(unpatched, '    ')}except RuntimeError as error:\n"
    outcomes = plainly(
        {"patched": code, "unpatched": f"{unpatched}    outcome = str(error)"},
        "tensorflow",
        "keras",
    )
    assert outcomes["patched"] == "cpu"
    assert "Collective ops must be configured at program startup" in outcomes["unpatched"]


def test_wiring_differs_only_in_the_index() -> None:
    wired = mirrored_wiring(["a:1", "b:2"], "auto")
    assert json.loads(wired[1].tf_config) == {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.full
def test_requested_communication_is_used() -> None:
    with nbdist.Cluster(hosts=2, framework="tensorflow", communication="ring") as cluster:
        run = cluster.run("strategy.extended._communication_options.implementation.name")
        assert set(run.results.values()) == {"'RING'"}


def test_ranks_wait_until_the_server_of_rank_0_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbdist.worker.tensorflow import strategy

    connect, refused = socket.create_connection, threading.Event()

    def note_refusal(*address: Any) -> socket.socket:
        try:
            return connect(*address)
        except ConnectionRefusedError:
            refused.set()
            raise

    monkeypatch.setattr(socket, "create_connection", note_refusal)
    with socket.socket() as server, ThreadPoolExecutor(1) as pool:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        waiting = pool.submit(strategy._await_server, f"127.0.0.1:{server.getsockname()[1]}")
        assert refused.wait(10)
        assert not waiting.done()
        server.listen()
        server.accept()[0].close()
        waiting.result(10)
