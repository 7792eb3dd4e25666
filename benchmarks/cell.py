"""A trivial cell on 4 engines: `%%dist_run` against ipyparallel's `%%px`, in one kernel."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import both
from benchmarks.case import Case
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNS = 100
WARM_UP = 10
MEASURE = f"""
import json
times = {{"ours": [], "theirs": []}}
for i in range({WARM_UP + RUNS}):
    for name, side in (("ours", ours), ("theirs", theirs)) if i % 2 else (("theirs", theirs), ("ours", ours)):
        times[name].append(side("x = 1"))
print(json.dumps({{name: values[{WARM_UP}:] for name, values in times.items()}}))
"""  # noqa: E501 - a cell of a notebook


def cases() -> Iterator[Case]:
    with Kernel() as kernel:
        kernel.run(both.START).check()
        times = json.loads(kernel.run(MEASURE).check().stdout.splitlines()[-1])
        kernel.run(both.STOP).check()
    yield Case(
        "trivial cell, 4 engines, against %%px",
        median(times["ours"]),
        median(times["theirs"]),
        unit="s",
        target=0.8,
        runs=RUNS,
    )
