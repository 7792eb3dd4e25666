"""The notebook is informed of the end of a cell despite errors at its end."""

from __future__ import annotations

import pytest

import nbdist

pytestmark = pytest.mark.usefixtures("bounded")


def check_it_goes_on(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_what_fails_as_it_is_closed_is_the_cells_error(cluster: nbdist.Cluster) -> None:
    cell = (
        "from nbdist.worker.runtime import context\n"
        "context.current().ending.callback(lambda: 1 / 0)"
    )
    with pytest.raises(nbdist.CellError, match="ZeroDivisionError"):
        cluster.run(cell)
    check_it_goes_on(cluster)
    with pytest.raises(nbdist.CellError, match="KeyError"):
        cluster.run(f"{cell}\nraise KeyError('first')")
    check_it_goes_on(cluster)


def test_text_of_a_class_of_its_own(cluster: nbdist.Cluster) -> None:
    cell = """
import sys
class Text(str):
    def __str__(self): return self
class Odd(Exception):
    def __str__(self): return Text("odd")
sys.stdout.write(Text("said"))
raise Odd
"""
    with pytest.raises(nbdist.CellError, match=r"Odd on rank .*: odd"):
        cluster.run(cell)
    check_it_goes_on(cluster)


def test_an_order_that_fails_leaves_the_watchdog_there(cluster: nbdist.Cluster) -> None:
    deaf = """
import signal, threading, time
from nbdist.worker import watchdog
where, watchdog._where = watchdog._where, lambda worker, main: 1 / 0
if rank: raise ValueError
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
time.sleep(0.8)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
    with pytest.raises(nbdist.CellError, match="ValueError"):
        cluster.run(deaf)
    there = cluster.run(
        "watchdog._where = where\n'nbdist-watchdog' in [t.name for t in threading.enumerate()]"
    )
    assert set(there.results.values()) == {"True"}


def test_an_interrupt_leaves_no_lock_of_the_probe_taken(cluster: nbdist.Cluster) -> None:
    """The interrupt arrives while the lock is held; nothing else would release it."""
    cell = """
import signal, threading
from nbdist.worker.runtime import context as state
changed = state.current().reporter._reporter._changed
class Interrupted:
    def __init__(self, lock): self.lock = lock
    def __enter__(self):
        self.lock.__enter__()
        signal.raise_signal(signal.SIGINT)
    def __exit__(self, *raised): self.lock.__exit__(*raised)
changed._lock = Interrupted(changed._lock)
try:
    print("said")
finally:
    changed._lock = changed._lock.lock
"""
    with pytest.raises(nbdist.CellError, match="KeyboardInterrupt"):
        cluster.run(cell)
    taken = """
def take():
    if changed.acquire(timeout=5):
        got.append(changed.release())
got, thread = [], threading.Thread(target=take)
thread.start()
thread.join()
len(got)
"""
    assert set(cluster.run(taken).results.values()) == {"1"}
