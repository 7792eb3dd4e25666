"""`%dist_start 4` until all ranks have answered, against ipyparallel and an import by hand.

Ours includes building the strategy and one all-reduce over it; the peer's ends when the framework
is imported.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.case import compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Case

RUNS = 3
OURS = """
import nbdist
cluster = nbdist.Cluster(hosts=4, framework="{framework}")
took = time.perf_counter() - start
cluster.stop()
"""
PEER = """
import logging, ipyparallel
cluster = ipyparallel.Cluster(n=4, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
client[:].execute("import {framework}", block=True)
took = time.perf_counter() - start
client.close()
cluster.stop_cluster_sync()
"""


def cases() -> Iterator[Case]:
    for framework in ("tensorflow", "jax"):
        yield compare(
            f"4 engines with {framework}, against ipyparallel.Cluster and import",
            lambda framework=framework: _seconds(OURS.format(framework=framework)),  # type: ignore[misc]
            lambda framework=framework: _seconds(PEER.format(framework=framework)),  # type: ignore[misc]
            unit="s",
            target=0.6,
            runs=RUNS,
        )


def _seconds(code: str) -> float:
    program = f"import time\nstart = time.perf_counter()\n{code}\nprint('TOOK', took)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    return next(float(line[5:]) for line in done.stdout.splitlines() if line.startswith("TOOK"))
