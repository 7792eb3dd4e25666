"""Step cell with all telemetry against the same cell with none, on 2 workers.

With telemetry, each step's row is sent to the notebook, the run is stored, and a Jupyter server
sends it to a client. Collectives are timed. Both sides run at the same time and take turns.

Without telemetry (`Settings.telemetry`), workers report no steps and time no collectives, and the
notebook stores no run. Both sides time steps and input, and have the engine's heartbeat and the
cell's output.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from benchmarks import ours
from benchmarks.bare import PROCESSES
from benchmarks.models import STEP
from benchmarks.step import lengths
from benchmarks.turns import in_turns, sides, take_turns
from nbdist.records import StateMessage, StepOptions
from nbdist.settings import Settings
from nbdist.telemetry.run_reader import stored_runs
from tests.server.jupyter import Closed, JupyterServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist
    from benchmarks.case import Case, Scale
    from benchmarks.models import Size
    from tests.server.jupyter import Received

TARGET = 1 / 0.99
ENDS = """
from nbdist.worker.runtime import context
ends = context.current().reporter.step_ends
"""
_WATCHED_S = 0.2
_LIMIT_S = 600
"""Time limit of the steps."""


def cases(scale: Scale) -> Iterator[Case]:
    settings = Settings.from_environment()
    silence = msgspec.structs.replace(settings, telemetry=False)
    with JupyterServer(settings.runs_path.parent) as server:
        for strategy in scale.strategies:
            with (
                ours.cluster(scale, PROCESSES, strategy) as reporting,
                ours.cluster(scale, PROCESSES, strategy, silence) as silent,
            ):
                for length in lengths(scale, strategy):
                    yield _case(scale, server, reporting, silent, strategy, *length)


def _case(
    scale: Scale,
    server: JupyterServer,
    reporting: nbdist.Cluster,
    silent: nbdist.Cluster,
    strategy: str,
    name: str,
    size: Size,
    steps: int,
    turn_s: float,
) -> Case:
    options = StepOptions(data="train", epochs=1000, batch=size.batch, shuffle=7, steps=steps)
    over = threading.Event()
    with ours.quiet(), ThreadPoolExecutor(3) as pool:
        for cluster in (reporting, silent):
            cluster.run(size.data() + size.model(strategy), strategy=strategy)
        watching = pool.submit(_watch, server, over)
        turns = pool.submit(take_turns, ours.pids(reporting), ours.pids(silent), turn_s, over)
        other = pool.submit(silent.run, STEP[strategy], step=options, strategy=strategy)
        try:
            reported_ends = ours.step_ends(reporting, STEP[strategy], options, strategy)
        finally:
            over.set()
        for each in (other, watching):
            each.result(_LIMIT_S)
        silent.run(ENDS)
        ends = silent.pull(["ends"], ranks="0")[0]["ends"]
    title = f"{strategy}, a {name} on 2 workers, with telemetry against none"
    return in_turns(scale, title, [sides(turns.result(_LIMIT_S), reported_ends, ends)], TARGET)


def _watch(server: JupyterServer, over: threading.Event) -> None:
    """Act as a browser that watches the running run until it ends."""

    async def follow() -> None:
        while not over.is_set():
            runs = [run for run in stored_runs(server.runs) if run.state().status == "running"]
            if not runs:
                await asyncio.sleep(_WATCHED_S)
                continue
            async with server.watch(runs[0].id) as watcher:
                while not _is_end(await watcher.receive()):
                    pass

    asyncio.run(follow())


def _is_end(message: Received) -> bool:
    """Return True if no more messages follow. The server keeps the sockets of ended runs open."""
    is_over = isinstance(message, StateMessage) and message.state.is_over
    return is_over or isinstance(message, Closed)
