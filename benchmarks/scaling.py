"""Step of a convolutional network on 2 workers with twice the batch, against 1 worker.

Each worker has its own core and one thread. While the single worker is measured, another single
worker computes the same steps on the other core, so that both sides share caches, memory
bandwidth and clock frequency with an equal load. Cells of both sides alternate. Efficiency is the
reciprocal of the ratio.

Processes that are stopped and continued by signals, as in `benchmarks.turns`, would mislead here:
a turn then contains only few of these long steps, and the ranks of one side stop at different
places of a collective.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.case import compare
from benchmarks.models import CNN, DATA, STEP
from nbdist.records import StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale

TARGET = 1 / 0.975
BATCH = {"mirrored": 512, "pjrt": 160}
"""Samples per worker in a step of about 150 ms."""
STEPS, SMOKE_STEPS = 24, 8
SAMPLES = 1 << 14
RUNS = 9
"""Cells of each side."""


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with (
            ours.cluster(scale, 1, strategy) as one,
            ours.cluster(scale, 1, strategy) as load,
            ours.cluster(scale, 2, strategy) as two,
        ):
            ours.move(load, like=two)
            yield _case(scale, strategy, one, load, two)


def _case(
    scale: Scale, strategy: str, one: nbdist.Cluster, load: nbdist.Cluster, two: nbdist.Cluster
) -> Case:
    images, steps = scale.of(BATCH[strategy], 2), scale.of(STEPS, SMOKE_STEPS)
    step_s = partial(_step_s, strategy, images, steps)
    data = DATA.format(samples=scale.of(SAMPLES, 64), features=32 * 32 * 3)
    with ours.quiet(), ThreadPoolExecutor(1) as pool:
        for cluster in (one, load, two):
            cluster.run(data + CNN[strategy], strategy=strategy)

        def loaded() -> float:
            other = pool.submit(step_s, load)
            seconds = step_s(one)
            other.result()
            return seconds

        return compare(
            f"{strategy}, a step of {images} images a worker: 2 workers against 1",
            partial(step_s, two),
            loaded,
            unit="s",
            target=TARGET,
            runs=scale.runs(RUNS),
        )


def _step_s(strategy: str, images: int, steps: int, cluster: nbdist.Cluster) -> float:
    """Return the median seconds of a step in the middle half of a cell.

    In the first and last quarter, the other single worker may not compute yet or no more.
    """
    batch = images * cluster.world_size
    options = StepOptions(data="train", epochs=1000, batch=batch, shuffle=7, steps=steps)
    ends = ours.step_ends(cluster, STEP[strategy], options, strategy)
    middle = ends[steps // 4 : -(steps // 4)]
    return median(b - a for a, b in pairwise(middle))
