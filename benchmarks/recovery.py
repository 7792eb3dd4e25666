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
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.case import Case, interleave
from benchmarks.models import STEP, TINY, Size
from nbdist.records import Saving, StepOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nbdist
    from benchmarks.case import Scale
    from nbdist.execution.result import Run

HOSTS, RUNS = 4, 3
TARGET_S = {("mirrored", 1): 2.5, ("mirrored", 0): 6.0, ("pjrt", 1): 1.0, ("pjrt", 0): 4.0}
SIZE = Size(batch=64, features=64, width=64, layers=2, samples=1 << 14)
OVERHEAD = 1.02
OVERHEAD_SIZE = Size(batch=512, features=256, width=256, layers=3, samples=1 << 14)
OVERHEAD_STEPS, OVERHEAD_RUNS = 225, 16
EVERY = 50
DEATH_STEP, STEPS = 60, 100

DEATH = """
import os, pathlib, signal, threading, time
from nbdist.worker.runtime import context
def die(step):
    while context.current().progress.step < step:
        time.sleep(0.001)
    pathlib.Path({note!r}).write_text(str(context.current().reporter.seconds()))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == world_size - 1:
    threading.Thread(target=die, args=({step},), daemon=True).start()
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


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with tempfile.TemporaryDirectory() as folder:
            by_hand = partial(_by_hand_s, scale.of(HOSTS, 1), strategy, scale.of(EVERY, 4))
            peer = cache(by_hand) if scale.smoke else by_hand
            for spares in (1, 0):
                yield _recover(scale, strategy, spares, folder, peer)
    for strategy in scale.strategies:
        yield _overhead(scale, strategy)


def _recover(
    scale: Scale, strategy: str, spares: int, folder: str, by_hand: Callable[[str], float]
) -> Case:
    hosts, runs = scale.of(HOSTS, 2), scale.runs(RUNS)
    with ours.cluster(scale, hosts, strategy, spares=spares) as cluster, ours.quiet():
        folders = (f"{folder}/{spares}-{number}" for number in range(RUNS + 1))

        def recover() -> float:
            return _lost_s(scale, cluster, strategy, next(folders))

        if not scale.smoke:
            recover()  # excludes the first compilation and imports from the measurement
        a, b = interleave(recover, lambda: by_hand(f"{folder}/1-0"), runs)
    target = TARGET_S[strategy, spares]
    name = (
        f"{strategy}, death of 1 of {hosts} workers to the next step with {spares} spare "
        f"(allowed: {target} s), against a recovery by hand"
    )
    return Case(name, median(a), median(b), "s", target / median(b), runs)


def _lost_s(scale: Scale, cluster: nbdist.Cluster, strategy: str, folder: str) -> float:
    """Return seconds from the death to the end of the next step, on the clock of the ranks."""
    every, death, steps = scale.of((EVERY, DEATH_STEP, STEPS), (4, 6, 12))
    note = Path(f"{folder}-died")
    cluster.run(SIZE.data() + SIZE.model(strategy), strategy=strategy)
    cluster.run(DEATH.format(note=str(note), step=death), once=True)
    run = _train(cluster, strategy, SIZE, steps, Saving(folder=folder, every_steps=every))
    assert len(run.recoveries) == 1
    died_s = float(note.read_text())
    return min(m.time_s for m in run.metrics if m.rank == 0 and m.time_s > died_s) - died_s


def _train(
    cluster: nbdist.Cluster, strategy: str, size: Size, steps: int, saving: Saving | None
) -> Run:
    options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    return cluster.run(STEP[strategy], step=options, strategy=strategy, saving=saving)


def _by_hand_s(hosts: int, strategy: str, every: int, folder: str) -> float:
    indent = 8 if strategy == "mirrored" else 4
    cell = BY_HAND[strategy].format(
        data=SIZE.data(),
        model=_indented(SIZE.model(strategy), 4 if strategy == "mirrored" else 0),
        step=_indented(STEP[strategy], indent),
        folder=f"{folder}/step-{every:08d}",
        batch=SIZE.batch,
    )
    text = PEER.format(hosts=hosts, cell=cell)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300
    )
    return float(done.stdout.split()[-1])


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


def _overhead(scale: Scale, strategy: str) -> Case:
    """Return the seconds per step with a checkpoint every `EVERY` steps, against none."""
    runs = scale.runs(OVERHEAD_RUNS)
    every, steps = scale.of((EVERY, OVERHEAD_STEPS), (4, 12))
    size = scale.of(OVERHEAD_SIZE, TINY)
    with (
        tempfile.TemporaryDirectory() as folder,
        ours.cluster(scale, 2, strategy) as cluster,
        ours.quiet(),
    ):
        cluster.run(size.data() + size.model(strategy), strategy=strategy)
        number = iter(range(runs))

        def step_s(saving: Saving | None) -> float:
            run = _train(cluster, strategy, size, steps, saving)
            ends = [m.time_s for m in run.metrics if m.rank == 0 and m.step > every // 2]
            return (ends[-1] - ends[0]) / (len(ends) - 1)

        def saved() -> float:
            return step_s(Saving(folder=f"{folder}/{next(number)}", every_steps=every))

        a, b = interleave(saved, lambda: step_s(None), runs)
    name = f"{strategy}, a step with a checkpoint every {every} steps, against none"
    return Case(name, median(a), median(b), "s", OVERHEAD, runs)
