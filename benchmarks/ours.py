"""Step cells of nbdist as one side of a benchmark."""

from __future__ import annotations

import contextlib
import io
import os
import time
from typing import TYPE_CHECKING

import psutil

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale
    from nbdist.records import StepOptions
    from nbdist.settings import Settings


FRAMEWORK = {"mirrored": "tensorflow", "pjrt": "jax"}


_shared: dict[str, list[nbdist.Cluster]] = {}


@contextlib.contextmanager
def cluster(
    scale: Scale, hosts: int, strategy: str, settings: Settings | None = None, spares: int = 0
) -> Iterator[nbdist.Cluster]:
    """Start workers for one strategy, each with its own core and one thread.

    Cases of a smoke run share clusters, which have the frameworks of all its strategies.
    `stop_shared` stops these.
    """
    shares = scale.smoke
    framework = "both" if shares and len(scale.strategies) > 1 else FRAMEWORK[strategy]
    key = repr((hosts, framework, settings, spares))
    if unused := _shared.get(key):
        running = unused.pop()
    else:
        with quiet():
            running = nbdist.Cluster(
                hosts=hosts,
                framework=framework,
                cpus_per_worker=1,
                settings=settings,
                spares=spares,
            )
    try:
        yield running
    except BaseException:
        running.stop()
        raise
    if shares:
        _shared.setdefault(key, []).append(running)
    else:
        running.stop()


def stop_shared() -> None:
    while _shared:
        for running in _shared.popitem()[1]:
            running.stop()


def pids(cluster: nbdist.Cluster) -> list[int]:
    """Return the process ids of the workers."""
    return [worker.pid for worker in cluster.workers(measure=False)]


def move(cluster: nbdist.Cluster, like: nbdist.Cluster) -> None:
    """Move all threads of a cluster's only worker to the core of another cluster's last worker."""
    cores = os.sched_getaffinity(pids(like)[-1])
    for thread in psutil.Process(pids(cluster)[0]).threads():
        os.sched_setaffinity(thread.id, cores)


def step_ends(
    cluster: nbdist.Cluster,
    cell: str,
    options: StepOptions | None,
    strategy: str,
    watch: int | None = None,
) -> list[float]:
    """Run a step cell and return the time of each step's report, by `time.perf_counter`.

    Without options, the cell contains a training loop.

    The times are rank 0's, relative to the time at which the cell was sent. This is some
    milliseconds too early.
    """
    began = time.perf_counter()
    run = cluster.run(cell, step=options, strategy=strategy, watch=watch)
    return [began + m.time_s for m in run.metrics if m.rank == 0 and m.step > 0]


def quiet() -> contextlib.AbstractContextManager[object]:
    """Discard the output of cells: standard output is for the benchmark's own lines."""
    return contextlib.redirect_stdout(io.StringIO())
