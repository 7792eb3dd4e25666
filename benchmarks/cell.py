"""Trivial cell on 4 engines: `%%dist_run` against ipyparallel's `%%px`, in one kernel.

With hundreds of light engines: `Cluster.run` against `DirectView.execute` on the same engines.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from statistics import median
from typing import TYPE_CHECKING

import nbdist
from benchmarks import both
from benchmarks.case import Case, compare
from nbdist.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale

RUNS = 100
WARM_UP = 10
MANY_RUNS = 15
MANY = ((16, 1.0), (64, 0.7), (256, 0.4))
"""Number of light engines, and the target."""

TIMEOUT_S = 60
MEASURE = """
import json
times = {"ours": [], "theirs": []}
for i in range(WARM_UP + RUNS):
    for name, side in (("ours", ours), ("theirs", theirs)) if i % 2 else (("theirs", theirs), ("ours", ours)):
        times[name].append(side("x = 1"))
print(json.dumps({name: values[WARM_UP:] for name, values in times.items()}))
"""  # noqa: E501 - a cell of a notebook


def cases(scale: Scale) -> Iterator[Case]:
    yield _few(scale)
    for engines, target in scale.of(MANY, ((2, 1.0),)):
        yield _many(engines, target, scale.runs(MANY_RUNS))


def _few(scale: Scale) -> Case:
    engines, runs = scale.of((4, RUNS), (2, 2))
    with both.kernel(scale, engines) as kernel:
        kernel.run(f"WARM_UP, RUNS = {scale.of(WARM_UP, 1)}, {runs}").check()
        times = json.loads(kernel.run(MEASURE).check().stdout.splitlines()[-1])
    return Case(
        f"trivial cell, {engines} engines, against %%px",
        median(times["ours"]),
        median(times["theirs"]),
        unit="s",
        target=0.8,
        runs=runs,
    )


def _many(engines: int, target: float, runs: int) -> Case:
    """Return the case with light, forked engines: 256 engines of ipyparallel would not fit."""
    light = Settings(worker_memory_bytes=20_000_000, start_timeout_s=600)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        nbdist.Cluster(hosts=engines, framework="none", settings=light) as cluster,
    ):
        view = cluster._worker_group.engines.controller.client[:]

        def ours() -> float:
            began = time.perf_counter()
            cluster.run("x = 1")
            return time.perf_counter() - began

        def theirs() -> float:
            began = time.perf_counter()
            view.execute("x = 1", block=False).get(TIMEOUT_S)
            return time.perf_counter() - began

        what = f"trivial cell, {engines} light engines, against DirectView.execute"
        return compare(what, ours, theirs, unit="s", target=target, runs=runs)
