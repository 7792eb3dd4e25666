"""The notebook is informed of the end of a cell despite errors at its end."""

from __future__ import annotations

import pytest

import nbdist

pytestmark = pytest.mark.usefixtures("bounded")


def assert_cluster_runs(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_error_in_a_closing_callback_is_reported(cluster: nbdist.Cluster) -> None:
    cell = (
        "from nbdist.worker.runtime import context\n"
        "context.current().ending.callback(lambda: 1 / 0)"
    )
    with pytest.raises(nbdist.CellError, match="ZeroDivisionError"):
        cluster.run(cell)
    assert_cluster_runs(cluster)
    with pytest.raises(nbdist.CellError, match="KeyError"):
        cluster.run(f"{cell}\nraise KeyError('first')")
    assert_cluster_runs(cluster)


def test_text_of_a_str_subclass_is_sent(cluster: nbdist.Cluster) -> None:
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
    assert_cluster_runs(cluster)


def test_failed_command_does_not_end_the_watchdog(cluster: nbdist.Cluster) -> None:
    cell = """
import signal, threading, time
from nbdist.worker import watchdog
where, watchdog._where = watchdog._where, lambda worker, main: 1 / 0
if rank: raise ValueError
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
time.sleep(0.8)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
    with pytest.raises(nbdist.CellError, match="ValueError"):
        cluster.run(cell)
    run = cluster.run(
        "watchdog._where = where\n'nbdist-watchdog' in [t.name for t in threading.enumerate()]"
    )
    assert set(run.results.values()) == {"True"}


def test_interrupt_releases_the_lock_of_the_reporter(cluster: nbdist.Cluster) -> None:
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
    check = """
def take():
    if changed.acquire(timeout=30):
        got.append(changed.release())
got, thread = [], threading.Thread(target=take)
thread.start()
thread.join()
len(got)
"""
    assert set(cluster.run(check).results.values()) == {"1"}
