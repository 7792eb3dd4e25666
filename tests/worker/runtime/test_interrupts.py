"""Repeated interrupts: the engine survives and the cell reports an error."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import nbdist


def test_interrupt_of_a_cell_never_reaches_the_next(cluster: nbdist.Cluster) -> None:
    """Stop the fork server, which sends the signals, until the ranks have finished."""
    fork_server = cluster._worker_group.engines.fleet.home.state.pid
    os.kill(fork_server, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (fork_server, signal.SIGCONT)).start()
    with pytest.raises(nbdist.CellError, match="ValueError"):
        cluster.run("import time\nif rank == 0:\n    raise ValueError\ntime.sleep(0.3)")
    assert cluster.run("time.sleep(1.5)\nrank").results == {0: "0", 1: "1", 2: "2"}


CELLS = {
    "busy": "total = 0\nfor i in range(10**9):\n    total += i",
    "cleans up": "import time\ntry:\n    time.sleep(60)\nfinally:\n    cleaned = True",
    "awaits": "import asyncio\nwhile True:\n    await asyncio.sleep(0.001)",
}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=name, marks=pytest.mark.full if name == "cleans up" else ())
        for name, cell in CELLS.items()
    ],
)
def test_many_interrupts_end_the_cell_but_not_the_engine(
    cluster: nbdist.Cluster, cell: str
) -> None:
    pids = [worker.pid for worker in cluster.workers()]
    finished = threading.Event()

    def send_interrupts() -> None:
        time.sleep(0.5)
        while not finished.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.0005)

    thread = threading.Thread(target=send_interrupts)
    thread.start()
    try:
        for _ in range(3):
            with pytest.raises(nbdist.CellError, match=r"KeyboardInterrupt|CancelledError"):
                cluster.run(cell)
    finally:
        finished.set()
        thread.join()
    assert [worker.pid for worker in cluster.workers()] == pids
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}
