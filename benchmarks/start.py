"""Time to the first training step, from a fresh start and after a restart, and time to engines.

The peer follows the documentation by hand: start ipyparallel's engines, import the framework,
configure their addresses, create the strategy or the mesh, and execute a step.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.case import Case, Skipped, interleave
from benchmarks.ours import FRAMEWORK
from tests.netns import Hosts, missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.case import Scale

RUNS = 3
TENSORFLOW = """
import tensorflow as tf
{strategy}
with strategy.scope():
    w = tf.Variable(tf.zeros(4), aggregation=tf.VariableAggregation.MEAN)
def replica(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.linalg.matvec(batch, w) - 1) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss
step = tf.function(lambda batch: strategy.run(replica, args=(batch,)))
float(step(tf.ones((2, 4))))
"""
"""Keras 3 cannot train by hand. docs/facts.md describes the reason and the remedy."""

JAX = """
import jax, jax.numpy as jnp, numpy as np
xs = np.ones((8, 4), "float32")
w = jnp.zeros(4)
"""
STEP = "w = w + batch.mean(0)\nloss = w.sum()"
ENGINES, LIGHT_ENGINES = 4, 64
OURS = {
    "mirrored": f"cluster.run({TENSORFLOW.format(strategy='')!r})",
    "pjrt": f"cluster.run({JAX!r}); cluster.run({STEP!r}, "
    "step=nbdist.records.StepOptions(data='xs', batch=8, steps=1))",
}
START = """
import nbdist
cluster = nbdist.Cluster(hosts={engines}, framework={framework!r})
{step}
took = time.perf_counter() - start
start = time.perf_counter()
cluster.restart()
{step}
again = time.perf_counter() - start
cluster.stop()
"""
BY_HAND = {
    "mirrored": """
import json, os, socket
addresses = client[:].apply_sync(port)
for rank, engine in enumerate(client.ids):
    task = {"type": "worker", "index": rank}
    wired = {"cluster": {"worker": addresses}, "task": task}
    client[engine].execute(f"import os; os.environ['TF_CONFIG'] = {json.dumps(wired)!r}")
client[:].execute(CELL, block=True)
""",
    "pjrt": """
coordinator = client[0].apply_sync(port)
for rank, engine in enumerate(client.ids):
    client[engine].execute(f"rank, count, coordinator = {rank}, {len(client)}, {coordinator!r}")
client[:].execute(CELL, block=True)
""",
}
CELLS = {
    "mirrored": TENSORFLOW.format(
        strategy="strategy = tf.distribute.MultiWorkerMirroredStrategy()"
    ),
    "pjrt": """
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(coordinator, count, rank, cluster_detection_method="deactivate")
mesh = jax.make_mesh((count,), ("data",))
rows = jax.NamedSharding(mesh, jax.P("data"))
own = np.ones((2, 4), "float32")
batch = jax.make_array_from_process_local_data(rows, own, (2 * count, 4))
step = jax.jit(lambda w, batch: w + batch.mean(0), out_shardings=jax.NamedSharding(mesh, jax.P()))
jax.block_until_ready(step(np.zeros(4, "float32"), batch))
""",
}
PEER = """
import logging, ipyparallel
def port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{{probe.getsockname()[1]}}"
CELL = {cell!r}
cluster = ipyparallel.Cluster(n={engines}, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
{wire}
took = again = time.perf_counter() - start
client.close()
cluster.stop_cluster_sync()
"""
LIGHT = """
import nbdist
from nbdist.settings import Settings
light = Settings(worker_memory_bytes=20_000_000, start_timeout_s=600)
cluster = nbdist.Cluster(hosts={hosts}, framework="none", settings=light)
took = again = time.perf_counter() - start
cluster.stop()
"""
LIGHT_PEER = """
import logging, ipyparallel
cluster = ipyparallel.Cluster(n={engines}, log_level=logging.ERROR, engine_timeout=600)
client = cluster.start_and_connect_sync()
took = again = time.perf_counter() - start
client.close()
cluster.stop_cluster_sync()
"""
SSH_PEER = """
import logging, ipyparallel
from traitlets.config import Config
config = Config()
profiles = {profiles!r}
config.SSHEngineSetLauncher.engines = {{
    host: {{"n": 1, "remote_profile_dir": folder, "to_send": []}} for host, folder in profiles.items()
}}
config.SSHEngineSetLauncher.ssh_args = ["-F", {ssh_config!r}]
config.SSHEngineSetLauncher.remote_python = config.SSHLauncher.remote_python = {python!r}
config.Cluster.controller_ip = config.Cluster.controller_location = {address!r}
config.Cluster.engine_launcher_class = "ssh"
cluster = ipyparallel.Cluster(
    n={engines}, config=config, profile_dir={profile!r}, load_profile=False, log_level=logging.ERROR
)
cluster.start_controller_sync()
cluster.start_engines_sync({engines})
client = cluster.connect_client_sync()
client.wait_for_engines({engines}, timeout=120, interactive=False)
took = again = time.perf_counter() - start
client.close()
cluster.stop_cluster_sync()
"""  # noqa: E501 - a program


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    runs = scale.runs(RUNS)
    engines, light = scale.of((ENGINES, LIGHT_ENGINES), (1, 2))
    for strategy in scale.strategies:
        code = START.format(engines=engines, framework=FRAMEWORK[strategy], step=OURS[strategy])
        peer = PEER.format(engines=engines, cell=CELLS[strategy], wire=BY_HAND[strategy])
        both, theirs = _pairs(code, peer, runs)
        step = f"{engines} engines to the first {strategy} step"
        by_hand = "against a start of ipyparallel by hand"
        yield _case(f"start of {step}, {by_hand}", [s for s, _ in both], theirs, 0.35)
        yield _case(f"restart of {step}, {by_hand}", [s for _, s in both], theirs, 0.15)
    ours, theirs = _pairs(LIGHT.format(hosts=light), LIGHT_PEER.format(engines=light), 1)
    name = f"start of {light} light engines, against ipyparallel.Cluster"
    yield _case(name, [s for s, _ in ours], theirs, 0.5)
    over_ssh = (
        f"start of {engines} hosts over ssh with light engines, against ipyparallel's launcher"
    )
    if missing():
        yield Skipped(over_ssh, missing())
        return
    with Hosts(engines) as hosts:
        ours, theirs = _pairs(*_over_ssh(hosts), runs)
    yield _case(over_ssh, [s for s, _ in ours], theirs, 0.25)


def _over_ssh(hosts: Hosts) -> tuple[str, str]:
    """Return the programs of nbdist and ipyparallel."""
    profiles = {host.address: str(host.folder / "profile") for host in hosts.each}
    peer = SSH_PEER.format(
        engines=len(hosts.each),
        profiles=profiles,
        ssh_config=str(hosts.ssh_config),
        python=sys.executable,
        address=hosts.address,
        profile=str(hosts.folder / "profile"),
    )
    (hosts.folder / "profile").mkdir()
    ours = LIGHT.format(hosts=hosts.names).replace(
        "start_timeout_s=600", f"ssh_config={str(hosts.ssh_config)!r}"
    )
    return ours, peer


def _pairs(ours: str, peer: str, runs: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Return seconds of start and restart of ours, and of the start of the peer."""
    found: list[tuple[float, float]] = []

    def start() -> float:
        found.append(_seconds(ours))
        return found[-1][0]

    _, theirs = interleave(start, lambda: _seconds(peer)[0], runs)
    return found, list(theirs)


def _case(what: str, ours: Sequence[float], theirs: Sequence[float], target: float) -> Case:
    middle, peer = sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2]
    return Case(what, middle, peer, "s", target, len(ours))


def _seconds(code: str) -> tuple[float, float]:
    """Return seconds of the start and of the restart."""
    program = f"import time\nstart = time.perf_counter()\n{code}\nprint('TOOK', took, again)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOOK"))
    took, again = map(float, line.split()[1:])
    return took, again
