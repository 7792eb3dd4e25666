"""Step of a convolutional network on 2 workers with twice the batch, against 1 worker.

Each worker has its own core and one thread. Both clusters exist at the same time and take turns.
Efficiency is the reciprocal of the ratio.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.models import CNN, DATA, STEP
from benchmarks.turns import in_turns, take_turns
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case

TARGET = 1 / 0.975
BATCH = {"mirrored": 512, "pjrt": 160}
"""Samples per worker in a step of about 150 ms."""
STEPS = 100
SAMPLES = 1 << 14
TURN_S = 1.0


def cases() -> Iterator[Case]:
    for strategy in ("mirrored", "pjrt"):
        with ours.cluster(1, strategy) as one, ours.cluster(2, strategy) as two:
            yield _case(strategy, one, two)


def _case(strategy: str, one: nbdist.Cluster, two: nbdist.Cluster) -> Case:
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(3) as pool:
        for cluster in (one, two):
            data = DATA.format(samples=SAMPLES, features=32 * 32 * 3)
            cluster.run(data + CNN[strategy], strategy=strategy)
        of_one, of_two = (pool.submit(_step_ends, cluster, strategy) for cluster in (one, two))
        turns = pool.submit(take_turns, ours.pids(two), ours.pids(one), TURN_S, over)
        wait([of_one, of_two], return_when=FIRST_COMPLETED)
        over.set()
        return in_turns(
            f"{strategy}, a step of {BATCH[strategy]} images a worker: 2 workers against 1",
            turns.result(),
            of_two.result(),
            of_one.result(),
            TARGET,
        )


def _step_ends(cluster: nbdist.Cluster, strategy: str) -> list[float]:
    batch = BATCH[strategy] * cluster.world_size
    options = StepOptions(data="train", epochs=1000, batch=batch, shuffle=7, steps=STEPS)
    return ours.step_ends(cluster, STEP[strategy], options, strategy)
