"""Step cell with all telemetry against the same cell with none, on 2 workers.

With telemetry, each step's row is sent to the notebook, the run is stored, and a Jupyter server
sends it to a client. Collectives are timed. Both sides run at the same time and take turns.

Without telemetry, `Reporter.report` is replaced by a function that only notes the time. Collectives
are not timed: TensorFlow steps have no clock, and JAX steps are never traced. The folder of runs is
a file, so that the notebook stores nothing. Both sides time steps and input, and have the engine's
heartbeat and the cell's output. Users have no such setting.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import ours
from benchmarks.bare import PROCESSES
from benchmarks.models import STEP
from benchmarks.step import LONG, SHORT
from benchmarks.turns import in_turns, take_turns
from nbdist.records import StepOptions
from nbdist.settings import Settings
from nbdist.telemetry.run_reader import kept
from tests.server.jupyter import JupyterServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Case
    from benchmarks.models import Size

TARGET = 1 / 0.99
STAMPED = """
import time
from nbdist.worker.runtime import context as state
ends, _reporter = [], state.current().reporter._reporter
_report = _reporter.report
def stamped(cell, columns, row):
    if "step_s" in columns.measures and row[1] > 0:
        ends.append(time.perf_counter())
    REPORT
_reporter.report = stamped
"""
"""Notes the end of each step on either side. All processes share the clock."""

OFF = """
from nbdist.worker.training import loop as training_loop, trace_schedule
trace_schedule.Samples.is_due = lambda self, step: False
if "mirrored" in state.current().strategies:
    from nbdist.worker.tensorflow import collective_timing
    collective_timing.choose = lambda *_: collective_timing.NoClock()
"""
_WATCHED_S = 0.2


def cases() -> Iterator[Case]:
    for strategy in ("mirrored", "pjrt"):
        for name, size, steps, turn_s in (
            ("2", SHORT[strategy], 2500, 0.25),
            ("50", LONG[strategy], 200, 0.5),
        ):
            yield _case(strategy, name, size, steps=steps, turn_s=turn_s)


def _case(strategy: str, name: str, size: Size, *, steps: int, turn_s: float) -> Case:
    options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    over = threading.Event()
    setup = size.data() + size.model(strategy)
    with contextlib.ExitStack() as undo:
        server = undo.enter_context(_server())
        settings = Settings(runs_folder=str(server.runs))
        told = undo.enter_context(ours.cluster(PROCESSES, strategy, settings))
        nowhere = Settings(runs_folder=undo.enter_context(tempfile.NamedTemporaryFile()).name)
        silent = undo.enter_context(ours.cluster(PROCESSES, strategy, nowhere))
        undo.enter_context(ours.quiet())
        for cluster, text in (
            (told, STAMPED.replace("REPORT", "_report(cell, columns, row)")),
            (silent, STAMPED.replace("REPORT", "return") + OFF),
        ):
            cluster.run(setup, strategy=strategy)
            cluster.run(text, strategy=strategy)
        pool = undo.enter_context(ThreadPoolExecutor(3))
        pool.submit(_watch, server, over)
        turns = pool.submit(take_turns, ours.pids(told), ours.pids(silent), turn_s, over)
        other = pool.submit(silent.run, STEP[strategy], step=options, strategy=strategy)
        try:
            told.run(STEP[strategy], step=options, strategy=strategy)
        finally:
            over.set()
        other.result()
        a, b = (c.pull(["ends"], ranks="0")[0]["ends"] for c in (told, silent))
        title = f"{strategy}, a step of about {name} ms on 2 workers, told against untold"
        return in_turns(title, turns.result(), a, b, TARGET)


@contextlib.contextmanager
def _server() -> Iterator[JupyterServer]:
    with tempfile.TemporaryDirectory() as folder, JupyterServer(Path(folder)) as server:
        yield server


def _watch(server: JupyterServer, over: threading.Event) -> None:
    """Act as a browser that watches the newest run until it ends."""

    async def follow() -> None:
        while not over.is_set():
            runs = kept(server.runs)
            if not runs:
                await asyncio.sleep(_WATCHED_S)
                continue
            async with server.watch(runs[0].id) as watcher:
                while not over.is_set():
                    await watcher.receive()

    asyncio.run(follow())
