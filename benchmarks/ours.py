"""Step cells of ours as a side of a benchmark."""

from __future__ import annotations

import contextlib
import io
import time
from typing import TYPE_CHECKING

import nbdist

if TYPE_CHECKING:
    from nbdist.records import StepOptions
    from nbdist.settings import Settings


FRAMEWORK = {"mirrored": "tensorflow", "pjrt": "jax"}


def cluster(
    hosts: int, strategy: str, settings: Settings | None = None, spares: int = 0
) -> nbdist.Cluster:
    """Workers for one strategy that each have a core of their own and compute with one thread."""
    with quiet():
        return nbdist.Cluster(
            hosts=hosts,
            framework=FRAMEWORK[strategy],
            cpus_per_worker=1,
            settings=settings,
            spares=spares,
        )


def pids(cluster: nbdist.Cluster) -> list[int]:
    """The processes of its workers."""
    return [worker.pid for worker in cluster.workers(measure=False)]


def step_ends(
    cluster: nbdist.Cluster, cell: str, options: StepOptions, strategy: str
) -> list[float]:
    """Run a step cell; when each step's report was there, in seconds of `time.perf_counter`.

    Rank 0's, counted from when the cell was sent, which is some milliseconds too early.
    """
    began = time.perf_counter()
    run = cluster.run(cell, step=options, strategy=strategy)
    return [began + m.time_s for m in run.metrics if m.rank == 0 and m.step > 0]


def quiet() -> contextlib.AbstractContextManager[object]:
    """What cells show goes nowhere: standard output has the benchmark's own lines."""
    return contextlib.redirect_stdout(io.StringIO())
