"""4 and 64 workers with 100 reports per second each, against ipyparallel's `publish_data`.

Reports take the whole path: all reporters in one process, the notebook's receiver, the run
directory, a Jupyter server, a page in Chromium. `publish_data` is called on 2 engines and ends in
the notebook's client, which stores only the latest data of each.

Both parts of the kernel's work are counted: the receiver's thread, and `tick` on the main thread.
`tick` writes files and computes findings many times per second.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import ipyparallel
import msgspec

from benchmarks.case import Case, Skipped
from benchmarks.limits import wait_until
from nbdist.execution import live_run
from nbdist.records import CellRequest, Columns, Rows, WorkerState
from nbdist.settings import Settings
from nbdist.telemetry.receiver import Receiver
from nbdist.telemetry.run_reader import find
from tests.browser.lab import browser, chromium
from tests.server.jupyter import BASE, TOKEN, JupyterServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.case import Scale
    from nbdist.records import AnyEvent

FEW, MANY, RATE = 4, 64, 100
SECONDS = 60
PEER_ENGINES, PEER_SECONDS = 2, 15
MOST_LATENCY_S = 0.150
MOST_OF_A_CORE = 0.05
LIMIT_S = 60
"""Time limit of a phase, beside the time that the reports take."""

COLUMNS = Columns(measures=("step_s", "input_s"), own=("loss", "sent"))
_SENDERS = """
import sys, threading, time
import msgspec
from nbdist.records import Columns, SocketAddress
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer
address = msgspec.json.decode(sys.argv[1], type=SocketAddress)
columns = msgspec.json.decode(sys.argv[2], type=Columns)
workers, rate, seconds = map(int, sys.argv[3:])
probes = [
    Reporter(address, RowBuffer(rank, MemoryGauge()), workers) for rank in range(workers)
]
began = time.perf_counter()
for step in range(1, rate * seconds + 1):
    for rank, probe in enumerate(probes):
        # Ranks are not in step: each has its own part of the interval.
        time.sleep(max(0, began + (step + rank / workers) / rate - time.perf_counter()))
        row = (1, step, time.perf_counter() - began, 0.01, 0.001, 1 / step, time.time())
        probe.report(1, columns, row)
for probe in probes:
    probe.close()
"""
_LISTEN = """url => {
  window.lags = [];
  const socket = new WebSocket(url);
  socket.binaryType = 'arraybuffer';
  socket.onmessage = ({data}) => {
    if (typeof data === 'string') return;
    const values = new Float64Array(data), width = WIDTH, now = Date.now() / 1000;
    for (let i = width; i < values.length; i += width)
      if (values[0] === 0) window.lags.push(now - values[i]);
  };
}""".replace("WIDTH", str(len(COLUMNS.names)))
_PUBLISH = """
import time
from ipyparallel.engine.datapub import publish_data
began = time.perf_counter()
for step in range(1, {rate} * {seconds} + 1):
    time.sleep(max(0, began + step / {rate} - time.perf_counter()))
    publish_data({{"step": step, "loss": 1 / step, "sent": time.time()}})
"""


@dataclass(frozen=True)
class Load:
    """Reports that are sent.

    Attributes:
        workers: number of workers.
        rate: reports per second of each worker.
        seconds: duration.
        peer_engines: number of engines of the peer.
        peer_seconds: duration for the peer.
    """

    workers: int
    rate: int = RATE
    seconds: int = SECONDS
    peer_engines: int = PEER_ENGINES
    peer_seconds: int = PEER_SECONDS

    @property
    def reports(self) -> int:
        return self.workers * self.rate * self.seconds


def cases(scale: Scale) -> Iterator[Case | Skipped]:
    loads = scale.of((Load(FEW), Load(MANY)), (Load(2, 20, 1, 1, 1),))
    if chromium() is None:
        yield Skipped("reports of workers on their way to the page", "no Chromium on the path")
        return
    peer = _peer(loads[0])
    for load in loads:
        yield from _cases_of(load, peer)


def _cases_of(load: Load, peer: dict[str, float]) -> Iterator[Case]:
    ours = _ours(load)
    sent = f"{load.workers} workers x {load.rate} reports per second for {load.seconds} s"
    lost = f"lost reports of {sent}, against those sent"
    yield Case(lost, load.reports - ours["kept"], load.reports, "reports", 0.0, 1)
    latency = "median time of a report from engine to page, against publish_data to the client"
    target = round(MOST_LATENCY_S / peer["lag_s"], 3)
    yield Case(f"{latency}, {load.workers} workers", ours["lag_s"], peer["lag_s"], "s", target, 1)
    each = peer["cpu_s"] / peer["reports"]
    target = round(MOST_OF_A_CORE / (load.workers * load.rate) / each, 3)
    both_s = ours["cpu_s"] + ours["tick_s"]
    parts = (
        ("the receiver's thread", ours["cpu_s"]),
        ("the receiver's thread, of writing and of findings", both_s),
    )
    for part, cpu_s in parts:
        share = f"{cpu_s / load.seconds:.1%} of a core"
        name = f"processor time of {part} for a report of {load.workers} workers"
        against = f"{name}, against the client's thread"
        yield Case(against, cpu_s / load.reports, each, "s", target, 1, share)


def _ours(load: Load) -> dict[str, float]:
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        server = undo.enter_context(JupyterServer(folder / "server"))
        window = undo.enter_context(
            browser(bypass_csp=True)
        )  # applies to the page of an API response
        request = CellRequest(number=1, source="", label=1, strategy="pjrt", awaits=False)
        workers = [
            WorkerState(rank=rank, host="here", pid=1, versions={}, devices=())
            for rank in range(load.workers)
        ]
        settings = Settings(runs_folder=str(server.runs))
        run = live_run.begin(request, "%%dist_run", [""], workers, settings)
        receiver = undo.enter_context(Receiver())
        receiver.subscribers.add(*map(_only_rows, run.subscribers))
        page = window.new_page()
        page.goto(f"http://{server.at}/{BASE}/api/status?token={TOKEN}")
        page.evaluate(_LISTEN, f"ws://{server.at}/{BASE}/nbdist/runs/{run.id}/live")
        tick_s = _send(load, receiver, run)
        cpu_s = _cpu_s(receiver)
        page.wait_for_timeout(2000)
        run.end("finished")
        lags = page.evaluate("() => window.lags")
        path = find(server.runs, run.id)
        table = next(t for t in path.tables() if t.columns == COLUMNS)
        rows = len(path.array(table))
        return {"kept": rows, "lag_s": median(lags), "cpu_s": cpu_s, "tick_s": tick_s}


def _only_rows(hear: Callable[[AnyEvent], None]) -> Callable[[AnyEvent], None]:
    def heard(record: AnyEvent) -> None:
        if isinstance(record, Rows):
            hear(record)

    return heard


def _send(load: Load, receiver: Receiver, run: live_run.LiveRun) -> float:
    """Send reports from another process and store them as a running cell does.

    Returns:
        Processor time of `tick` in seconds.
    """
    tick_s = 0.0
    arguments = [
        msgspec.json.encode(receiver.bound_socket.address).decode(),
        msgspec.json.encode(COLUMNS).decode(),
        *map(str, (load.workers, load.rate, load.seconds)),
    ]
    with subprocess.Popen([sys.executable, "-c", _SENDERS, *arguments]) as senders:

        def has_ended() -> bool:
            nonlocal tick_s
            tick_s += _tick_s(run)
            return senders.poll() is not None

        try:
            wait_until(has_ended, load.seconds + LIMIT_S, "the end of the senders")
        finally:
            senders.kill()
    time.sleep(0.5)
    return tick_s + _tick_s(run)


def _tick_s(run: live_run.LiveRun) -> float:
    """Return the processor time of one tick."""
    began = time.thread_time()
    run.tick()
    return time.thread_time() - began


def _cpu_s(receiver: Receiver) -> float:
    """Return the processor time of the receiver's thread."""
    thread = receiver._thread.ident
    assert thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _peer(load: Load) -> dict[str, float]:
    with ipyparallel.Cluster(n=load.peer_engines) as client:
        code = _PUBLISH.format(rate=load.rate, seconds=load.peer_seconds)
        view = client[:]
        view.use_cloudpickle().get(LIMIT_S)
        result = view.apply_async(exec, code)
        lags: list[float] = []
        seen: dict[int, float] = {}
        thread = _client_thread(client)
        began = time.clock_gettime(thread)
        deadline = time.monotonic() + load.peer_seconds + LIMIT_S
        while not result.ready():
            if time.monotonic() > deadline:
                raise TimeoutError("ipyparallel's engines did not publish all reports in time")
            for rank, data in enumerate(result.data):
                if data and data["sent"] != seen.get(rank):
                    seen[rank] = data["sent"]
                    lags.append(time.time() - data["sent"])
            time.sleep(0.001)
        cpu_s = time.clock_gettime(thread) - began
    reports = load.peer_engines * load.rate * load.peer_seconds
    return {"lag_s": median(lags), "cpu_s": cpu_s, "reports": reports}


def _client_thread(client: Any) -> int:
    """Return the clock id of the thread in which the client receives published data."""
    (thread,) = [t for t in threading.enumerate() if t is client._io_thread]
    assert thread.ident is not None
    return time.pthread_getcpuclockid(thread.ident)
