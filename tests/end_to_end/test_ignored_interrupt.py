"""A rank ignores interrupts in a cell without steps."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import nbdist
from nbdist.utils.polling import repeat_until
from tests import clusters

TIMEOUT_S = 30
UNRESPONSIVE = """
import ctypes, pathlib, signal
if rank == 1:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pathlib.Path({note!r}).touch()
    ctypes.CDLL(None).sleep({seconds})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
"""
"""Rank 1 runs C code with SIGINT blocked, like a compiler, for a limited time."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="none") as running:
        yield running


def interrupt(marker: Path, after_s: Sequence[float]) -> None:
    """Interrupt this process at these seconds after the rank blocks SIGINT."""

    def send() -> None:
        assert repeat_until(marker.exists, TIMEOUT_S)
        started = time.monotonic()
        for seconds in after_s:
            time.sleep(max(started + seconds - time.monotonic(), 0.0))
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("repeat_s", [0.5, pytest.param(5.0, marks=pytest.mark.full)])
def test_second_interrupt_kills_the_rank(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], repeat_s: float
) -> None:
    """The second interrupt arrives before or after nbdist reports that the first had no effect."""
    pids = {worker.pid for worker in cluster.workers()}
    cell = UNRESPONSIVE.format(note=str(tmp_path / "deaf"), seconds=10 * TIMEOUT_S)
    interrupt(tmp_path / "deaf", (0.2, 0.2 + repeat_s))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cluster.run(cell)
    assert time.monotonic() - started < TIMEOUT_S
    assert "rank 1 does not respond: nbdist kills it" in capsys.readouterr().err
    assert not pids & {worker.pid for worker in cluster.workers()}
    assert cluster.run("rank").results == {0: "0", 1: "1"}


@pytest.mark.full  # 12 s. tests/execution/test_cancellation.py
def test_first_interrupt_does_not_kill_the_rank(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After one interrupt the rank keeps its variables and accepts cells when the call returns."""
    pids = {worker.pid for worker in cluster.workers()}
    cluster.run("kept = rank")
    cell = UNRESPONSIVE.format(note=str(tmp_path / "deaf"), seconds=12)
    interrupt(tmp_path / "deaf", (0.2,))
    with pytest.raises(KeyboardInterrupt):
        cluster.run(cell)
    stderr = capsys.readouterr().err
    assert "rank 1 does not respond to the interrupt: interrupt again to kill it" in stderr
    assert "nbdist kills it" not in stderr
    with pytest.raises(nbdist.WorkerError, match="rank 1 is still in an earlier cell"):
        cluster.run("kept")
    assert repeat_until(lambda: not cluster._runner.busy(), TIMEOUT_S)
    assert cluster.run("kept").results == {0: "0", 1: "1"}
    assert pids == {worker.pid for worker in cluster.workers()}
