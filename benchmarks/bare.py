"""Training by hand without nbdist: `python -m benchmarks.bare STRATEGY RANK PORTS SIZE STAMPS`.

This is the code of an expert user. The step is compiled as a whole with its collectives:
`tf.function` around `strategy.run`, or `jax.jit` over a mesh with donated state. Batches are this
process's rows of shuffled arrays in memory, without an input pipeline. Each loss is read two steps
later and stored in a list. The script runs forever and writes the end time of each step to the file
STAMPS.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.models import Size

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSES = 2
IN_FLIGHT = 2
MOST_STEPS = 1 << 20


PR_SET_PDEATHSIG = 1


def main() -> None:
    # End with the benchmark, also if a turn has stopped this process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    strategy, rank, ports, size, path = sys.argv[1:]
    make = {"mirrored": _mirrored, "pjrt": _pjrt}[strategy]
    namespace: dict[str, Any] = {}
    chosen = Size(**json.loads(size))
    exec(chosen.data(), namespace)  # noqa: S102 - our own text
    step = make(chosen.model(strategy), namespace, int(rank), ports.split(","))
    stamps = np.memmap(path, np.float64, "r+", shape=(MOST_STEPS,))
    flying: deque[Any] = deque()
    losses: list[float] = []
    batches = _batches(namespace["images"], namespace["labels"], chosen.batch, int(rank))
    for number, (x, y) in enumerate(batches):
        flying.append(step(x, y))
        if len(flying) > IN_FLIGHT:
            losses.append(float(flying.popleft()))
            stamps[number] = time.perf_counter()


def _batches(
    images: np.ndarray, labels: np.ndarray, batch: int, rank: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    each = batch // PROCESSES
    random = np.random.default_rng(7)
    while True:
        order = random.permutation(len(images))
        for start in range(rank * each, len(images), batch):
            rows = order[start : start + each]
            yield images[rows], labels[rows]


def _mirrored(model: str, namespace: dict[str, Any], rank: int, ports: list[str]) -> Any:
    hosts = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        exec(model, namespace)  # noqa: S102 - our own text
    net, optimizer, loss_of = namespace["model"], namespace["optimizer"], namespace["loss_of"]

    def one_replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, net(x, training=True))
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        return strategy.run(one_replica, (x, y))

    return lambda x, y: step(tf.convert_to_tensor(x), tf.convert_to_tensor(y))


def _pjrt(model: str, namespace: dict[str, Any], rank: int, ports: list[str]) -> Any:
    import jax

    jax.distributed.initialize(f"127.0.0.1:{ports[0]}", PROCESSES, rank)
    exec(model, namespace)  # noqa: S102 - our own text
    loss_of = namespace["loss_of"]
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.NamedSharding(mesh, jax.P())
    by_row = jax.NamedSharding(mesh, jax.P("data"))
    state = jax.device_put((namespace["params"], namespace["velocity"]), replicated)

    def update(state: Any, x: Any, y: Any) -> Any:
        params, velocity = state
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        return (jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity), velocity), loss

    compiled = jax.jit(update, donate_argnums=0, out_shardings=(replicated, replicated))

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        nonlocal state
        batch = [jax.make_array_from_process_local_data(by_row, array) for array in (x, y)]
        state, loss = compiled(state, *batch)
        return loss

    return step


if __name__ == "__main__":
    main()
