"""Training loop in a plain cell against a step cell with the same body, on 2 workers.

Both sides read the same list of batches. They run at the same time and take turns.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from textwrap import indent
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.bare import PROCESSES
from benchmarks.limits import wait_until
from benchmarks.models import STEP
from benchmarks.step import lengths
from benchmarks.turns import in_turns, take_turns
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale
    from benchmarks.models import Size
    from benchmarks.turns import Turn

TARGET = 1.02
_LIMIT_S = 600
"""Time limit of the steps."""
_START_LIMIT_S = 60

_BATCHES = """
batches = [
    (images[i : i + {batch}], labels[i : i + {batch}]) for i in range(0, SAMPLES, {batch})
]
"""
_JIT = """
@jax.jit
def train_step(params, velocity, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    params = jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity)
    return params, velocity, loss
"""
_BODY = {
    "mirrored": STEP["mirrored"].replace("x, y = batch\n", ""),
    "pjrt": "params, velocity, loss = train_step(params, velocity, x, y)\n",
}
_LOOP = """
import itertools
for x, y in itertools.islice(itertools.cycle(batches), {steps}):
{body}
"""


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with (
            ours.cluster(scale, PROCESSES, strategy) as looping,
            ours.cluster(scale, PROCESSES, strategy) as stepping,
        ):
            for length in lengths(scale, strategy):
                yield _case(scale, looping, stepping, strategy, *length)


def _case(
    scale: Scale,
    looping: nbdist.Cluster,
    stepping: nbdist.Cluster,
    strategy: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    setup, loop = setup_of(size, strategy), loop_of(strategy, steps)
    options = StepOptions(data="batches", epochs=1000, steps=steps)
    body = f"x, y = batch\n{_BODY[strategy]}loss"
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(2) as pool:
        for cluster in (looping, stepping):
            cluster.run(setup, strategy=strategy)
        other = pool.submit(ours.step_ends, stepping, body, options, strategy)
        turns = pool.submit(turns_once_busy, looping, stepping, turn_s, over)
        try:
            ends = ours.step_ends(looping, loop, None, strategy)
        finally:
            over.set()
        peer_ends = other.result(_LIMIT_S)
    title = f"{strategy}, a {name} on 2 workers, in a loop against a step cell"
    return in_turns(scale, title, turns.result(_LIMIT_S), ends, peer_ends, TARGET)


def setup_of(size: Size, strategy: str) -> str:
    """Return a cell that creates the model and a list of batches."""
    setup = size.data() + size.model(strategy) + _BATCHES.format(batch=size.batch)
    return setup + _JIT if strategy == "pjrt" else setup


def loop_of(strategy: str, steps: int) -> str:
    """Return a training loop over the batches."""
    return _LOOP.format(steps=steps, body=indent(_BODY[strategy], "    "))


def turns_once_busy(
    looping: nbdist.Cluster, stepping: nbdist.Cluster, turn_s: float, over: threading.Event
) -> tuple[Turn, ...]:
    """Take turns once the workers of both sides have received their cell.

    A worker that is stopped before counts the seconds of its cell from the next turn on.
    """

    def busy() -> bool:
        workers = (*looping.workers(measure=False), *stepping.workers(measure=False))
        return over.is_set() or all(worker.state == "busy" for worker in workers)

    wait_until(busy, _START_LIMIT_S, "cells on the workers of both sides")
    return take_turns(ours.pids(looping), ours.pids(stepping), turn_s, over)
