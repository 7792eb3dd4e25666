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
from benchmarks.step import SMOKE_STEPS
from benchmarks.turns import in_turns, take_turns
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale

TARGET = 1 / 0.975
BATCH = {"mirrored": 512, "pjrt": 160}
"""Samples per worker in a step of about 150 ms."""
STEPS = 100
SAMPLES = 1 << 14
TURN_S = 1.0
LIMIT_S = 600
"""Time limit of the steps."""


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in ("mirrored", "pjrt"):
        with (
            ours.cluster(scale, 1, strategy) as one,
            ours.cluster(scale, 2, strategy) as two,
        ):
            yield _case(scale, strategy, one, two)


def _case(scale: Scale, strategy: str, one: nbdist.Cluster, two: nbdist.Cluster) -> Case:
    images = scale.of(BATCH[strategy], 2)
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(3) as pool:
        for cluster in (one, two):
            data = DATA.format(samples=scale.of(SAMPLES, 64), features=32 * 32 * 3)
            cluster.run(data + CNN[strategy], strategy=strategy)
        of_one, of_two = (
            pool.submit(_step_ends, cluster, strategy, images, scale.of(STEPS, SMOKE_STEPS))
            for cluster in (one, two)
        )
        turn_s = scale.of(TURN_S, 0.2)
        turns = pool.submit(take_turns, ours.pids(two), ours.pids(one), turn_s, over)
        wait([of_one, of_two], LIMIT_S, return_when=FIRST_COMPLETED)
        over.set()
        return in_turns(
            scale,
            f"{strategy}, a step of {images} images a worker: 2 workers against 1",
            turns.result(LIMIT_S),
            of_two.result(LIMIT_S),
            of_one.result(LIMIT_S),
            TARGET,
        )


def _step_ends(cluster: nbdist.Cluster, strategy: str, images: int, steps: int) -> list[float]:
    batch = images * cluster.world_size
    options = StepOptions(data="train", epochs=1000, batch=batch, shuffle=7, steps=steps)
    return ours.step_ends(cluster, STEP[strategy], options, strategy)
