"""Repeated interrupts: the engine survives and the cell reports an error."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import nbdist


def test_an_interrupt_of_one_cell_never_reaches_the_next(cluster: nbdist.Cluster) -> None:
    """Stop the fork server, which sends the signals, until the ranks have finished."""
    seed = cluster._worker_group.engines.fleet.home.state.pid
    os.kill(seed, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (seed, signal.SIGCONT)).start()
    with pytest.raises(nbdist.CellError, match="ValueError"):
        cluster.run("import time\nif rank == 0:\n    raise ValueError\ntime.sleep(0.3)")
    assert cluster.run("time.sleep(1.5)\nrank").results == {0: "0", 1: "1", 2: "2"}


CELLS = {
    "busy": "total = 0\nfor i in range(10**9):\n    total += i",
    "cleans up": "import time\ntry:\n    time.sleep(60)\nfinally:\n    cleaned = True",
    "awaits": "import asyncio\nwhile True:\n    await asyncio.sleep(0.001)",
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=list(CELLS))
def test_a_hail_of_interrupts_ends_the_cell_and_not_the_engine(
    cluster: nbdist.Cluster, cell: str
) -> None:
    pids = [worker.pid for worker in cluster.workers()]
    over = threading.Event()

    def hail() -> None:
        time.sleep(0.5)
        while not over.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGINT)
            time.sleep(0.0005)

    thread = threading.Thread(target=hail)
    thread.start()
    try:
        for _ in range(3):
            with pytest.raises(nbdist.CellError, match=r"KeyboardInterrupt|CancelledError"):
                cluster.run(cell)
    finally:
        over.set()
        thread.join()
    assert [worker.pid for worker in cluster.workers()] == pids
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}
