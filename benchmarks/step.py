"""Step cell on 2 workers, against a script without nbdist that makes the same steps.

The script is `benchmarks/bare.py`. Every process of either side has its own core and one thread.
Both sides exist at the same time and take turns. A step is the time between two reports: gather
rows, execute the step, read and report its loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from benchmarks import ours
from benchmarks.bare import MOST_STEPS, PROCESSES
from benchmarks.limits import wait_until
from benchmarks.models import STEP, TINY, Size
from benchmarks.turns import in_turns, sides, take_turns
from nbdist.cluster import environment
from nbdist.records import ClusterRequest, Host, StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale
    from nbdist.records import Framework

TARGET = 1 / 0.99
SHORT = {
    "mirrored": Size(batch=64, features=64, width=64, layers=2, samples=1 << 16),
    "pjrt": Size(batch=256, features=64, width=128, layers=2, samples=1 << 17),
}
LONG = {
    "mirrored": Size(batch=3072, features=64, width=512, layers=3, samples=3 << 16),
    "pjrt": Size(batch=2048, features=64, width=512, layers=3, samples=1 << 17),
}
SMOKE_STEPS = 20
_START_TIMEOUT_S = 120
_TURN_TIMEOUT_S = 60
_WARM_UP = 10


def lengths(scale: Scale, strategy: str) -> tuple[tuple[str, Size, int, float], ...]:
    """Return name, size and number of steps, and seconds of a turn, for short and long steps."""
    if scale.smoke:
        return (("tiny step", TINY, SMOKE_STEPS, 0.2),)
    return ("step of about 2 ms", SHORT[strategy], 2500, 0.25), (
        "step of about 50 ms",
        LONG[strategy],
        160,
        0.5,
    )


def cases(scale: Scale) -> Iterator[Case]:
    for strategy in scale.strategies:
        with ours.cluster(scale, PROCESSES, strategy) as cluster:
            for length in lengths(scale, strategy):
                yield _case(scale, cluster, strategy, *length)


def _case(
    scale: Scale,
    cluster: nbdist.Cluster,
    strategy: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    over = threading.Event()
    with _bare(strategy, size) as (peer, stamps), ours.quiet(), ThreadPoolExecutor(1) as pool:
        cluster.run(size.data() + size.model(strategy), strategy=strategy)
        turns = pool.submit(take_turns, ours.pids(cluster), peer, turn_s, over)
        try:
            ends = ours.step_ends(cluster, STEP[strategy], options, strategy)
        finally:
            over.set()
        return in_turns(
            scale,
            f"{strategy}, a {name} on 2 workers, against a script by hand",
            [sides(turns.result(_TURN_TIMEOUT_S), ends, stamps[stamps > 0].tolist())],
            TARGET,
        )


@contextlib.contextmanager
def _bare(strategy: str, size: Size) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the process ids of the running script, and the end times of steps of its rank 0."""
    ports = ",".join(map(str, _free_ports()))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        processes = []
        for rank in range(PROCESSES):
            path = Path(folder, str(rank))
            np.memmap(path, np.float64, "w+", shape=(MOST_STEPS,))
            arguments = [strategy, str(rank), ports, json.dumps(asdict(size)), str(path)]
            errors = undo.enter_context(Path(folder, f"{rank}.log").open("wb"))
            process = _start(arguments, rank, errors)
            undo.enter_context(process)
            undo.callback(process.kill)
            processes.append(process)
        stamps = np.memmap(Path(folder, "0"), np.float64, "r", shape=(MOST_STEPS,))

        def steps() -> bool:
            for rank, process in enumerate(processes):
                if process.poll() is not None:
                    log = Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace")
                    raise RuntimeError(f"rank {rank} of the script failed: {log[-2000:]}")
            return bool(np.count_nonzero(stamps) >= _WARM_UP)

        wait_until(steps, _START_TIMEOUT_S, f"{_WARM_UP} steps of the script", 0.1)
        yield [process.pid for process in processes], stamps


def _start(arguments: list[str], rank: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process in the environment of an engine, on the core of the engine with its rank.

    It has its own session like engines. Linux shares processor time by session
    (`sched_autogroup_enabled`), so on a busy machine two processes in a session would each get
    half.
    """
    framework: Framework = "tensorflow" if arguments[0] == "mirrored" else "jax"
    request = ClusterRequest((Host(),) * PROCESSES, (framework,), cpus_per_worker=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare", *arguments],
        env={**os.environ, **environment.shared(request)},
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process.pid, {cores[rank % len(cores)]})
    return process


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(PROCESSES)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
