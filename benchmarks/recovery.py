"""Recovery after kill -9 of one of 4 workers until the next step ends, against one by hand.

By hand, a user without recovery starts new ipyparallel engines once the death is noticed. The user
then imports the framework, creates strategy and model, reads the checkpoint and executes one step.
The target of each case is in seconds. Its ratio is to the peer's time in the same run.

Also measures the cost of a checkpoint every 50 steps: steps with and without, alternately.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.case import Case, interleave
from benchmarks.models import STEP, Size
from nbdist.records import Saving, StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from nbdist.execution.result import Run

HOSTS, RUNS = 4, 3
TARGET_S = {("mirrored", 1): 2.5, ("mirrored", 0): 6.0, ("pjrt", 1): 1.0, ("pjrt", 0): 4.0}
SIZE = Size(batch=64, features=64, width=64, layers=2, samples=1 << 14)
OVERHEAD = 1.02
OVERHEAD_SIZE = Size(batch=512, features=256, width=256, layers=3, samples=1 << 14)
OVERHEAD_STEPS, OVERHEAD_RUNS = 225, 16
EVERY = 50

DEATH = """
import os, pathlib, signal, threading, time
from nbdist.worker.runtime import context
def die(step):
    while context.current().progress.step < step:
        time.sleep(0.001)
    pathlib.Path({note!r}).write_text(str(context.current().reporter.seconds()))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == world_size - 1:
    threading.Thread(target=die, args=(60,), daemon=True).start()
"""
PEER = """
import json, logging, os, pathlib, socket, sys, tempfile, time
import ipyparallel
start = time.perf_counter()
cluster = ipyparallel.Cluster(n={hosts}, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
ports = []
for _ in range({hosts}):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports.append(free.getsockname()[1])
view = client[:]
for rank, engine in enumerate(client.ids):
    client[engine].push(dict(rank=rank, ports=ports), block=True)
view.execute({cell!r}, block=True).get()
print(time.perf_counter() - start)
client.close()
cluster.stop_cluster_sync()
"""
BY_HAND = {
    "mirrored": """
import json, os
os.environ["TF_CONFIG"] = json.dumps({{
    "cluster": {{"worker": [f"127.0.0.1:{{p}}" for p in ports]}},
    "task": {{"type": "worker", "index": rank}},
}})
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
{data}
with strategy.scope():
{model}
saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
saved.read("{folder}/tensorflow/state").expect_partial()
each = {batch} // len(ports)
@tf.function
def step(batch):
    def replica(batch):
{step}
    return strategy.run(replica, args=(batch,))
step(tuple(tf.convert_to_tensor(c[rank * each:][:each]) for c in train))
""",
    "pjrt": """
import jax
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(
    f"127.0.0.1:{{ports[0]}}", len(ports), rank,
    coordinator_bind_address=f"127.0.0.1:{{ports[0]}}", cluster_detection_method="deactivate")
{data}
{model}
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp
ocp.PyTreeCheckpointer().restore("{folder}/orbax")
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
rows = jax.NamedSharding(mesh, jax.P("data"))
each = {batch} // len(ports)
batch = tuple(jax.make_array_from_process_local_data(rows, c[rank * each:][:each]) for c in train)
whole = jax.NamedSharding(mesh, jax.P())
params, velocity = jax.tree.map(
    lambda a: jax.make_array_from_process_local_data(whole, np.asarray(a)), (params, velocity))
@jax.jit
def step(params, velocity, batch):
{step}
    return params, velocity
jax.block_until_ready(step(params, velocity, batch))
""",
}


def cases() -> Iterator[Case]:
    for strategy in ("mirrored", "pjrt"):
        for spares in (1, 0):
            yield _recover(strategy, spares)
    for strategy in ("mirrored", "pjrt"):
        yield _overhead(strategy)


def _recover(strategy: str, spares: int) -> Case:
    with (
        ours.quiet(),
        tempfile.TemporaryDirectory() as folder,
        ours.cluster(HOSTS, strategy, spares=spares) as cluster,
    ):
        number = iter(range(RUNS + 1))

        def recoveries() -> float:
            return _lost_s(cluster, strategy, f"{folder}/{next(number)}")

        recoveries()  # excludes the first compilation and imports from the measurement
        a, b = interleave(recoveries, lambda: _by_hand_s(strategy, f"{folder}/0"), RUNS)
    target = TARGET_S[strategy, spares]
    name = f"{strategy}, kill -9 to the next step, {spares} spare (target {target} s), by hand"
    return Case(name, median(a), median(b), "s", target / median(b), RUNS)


def _lost_s(cluster: nbdist.Cluster, strategy: str, folder: str) -> float:
    """Return seconds from the death to the end of the next step, on the clock of the ranks."""
    note = Path(f"{folder}-died")
    cluster.run(SIZE.data() + SIZE.model(strategy), strategy=strategy)
    cluster.run(DEATH.format(note=str(note)), once=True)
    run = _train(cluster, strategy, SIZE, 100, Saving(folder=folder, every_steps=EVERY))
    assert len(run.recoveries) == 1
    died_s = float(note.read_text())
    return min(m.time_s for m in run.metrics if m.rank == 0 and m.time_s > died_s) - died_s


def _train(
    cluster: nbdist.Cluster, strategy: str, size: Size, steps: int, saving: Saving | None
) -> Run:
    options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    return cluster.run(STEP[strategy], step=options, strategy=strategy, saving=saving)


def _by_hand_s(strategy: str, folder: str) -> float:
    indent = 8 if strategy == "mirrored" else 4
    cell = BY_HAND[strategy].format(
        data=SIZE.data(),
        model=_indented(SIZE.model(strategy), 4 if strategy == "mirrored" else 0),
        step=_indented(STEP[strategy], indent),
        folder=f"{folder}/step-{EVERY:08d}",
        batch=SIZE.batch,
    )
    text = PEER.format(hosts=HOSTS, cell=cell)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout.split()[-1])


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


def _overhead(strategy: str) -> Case:
    """Return the seconds per step with a checkpoint every `EVERY` steps, against none."""
    with (
        ours.quiet(),
        tempfile.TemporaryDirectory() as folder,
        ours.cluster(2, strategy) as cluster,
    ):
        cluster.run(OVERHEAD_SIZE.data() + OVERHEAD_SIZE.model(strategy), strategy=strategy)
        number = iter(range(OVERHEAD_RUNS))

        def saved() -> float:
            saving = Saving(folder=f"{folder}/{next(number)}", every_steps=EVERY)
            return _step_s(cluster, strategy, saving)

        a, b = interleave(saved, lambda: _step_s(cluster, strategy, None), OVERHEAD_RUNS)
    name = f"{strategy}, a step with a checkpoint every {EVERY}, against none"
    return Case(name, median(a), median(b), "s", OVERHEAD, OVERHEAD_RUNS)


def _step_s(cluster: nbdist.Cluster, strategy: str, saving: Saving | None) -> float:
    run = _train(cluster, strategy, OVERHEAD_SIZE, OVERHEAD_STEPS, saving)
    ends = [m.time_s for m in run.metrics if m.rank == 0 and m.step > EVERY // 2]
    return (ends[-1] - ends[0]) / (len(ends) - 1)
