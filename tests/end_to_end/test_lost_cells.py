"""Lost messages between the notebook and the ranks leave no rank busy."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

import nbdist
from nbdist.execution import cancellation
from nbdist.records import CellEnded, CellRequest, StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import AnyEvent, Command

pytestmark = pytest.mark.usefixtures("bounded")

ALL_RANKS = {0: "0", 1: "1", 2: "2"}


class InterruptedSocket:
    """Socket that raises SIGINT between the address frame and the command of a rank."""

    def __init__(self, socket: Any, name: bytes) -> None:
        self._socket = socket
        self._name = name

    def send(self, frame: bytes, flags: int = 0) -> None:
        self._socket.send(frame, flags)
        if flags & zmq.SNDMORE and frame == self._name:
            self._name = b""
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", [pytest.param(b"0", marks=pytest.mark.full), b"1"])
@pytest.mark.parametrize("step", [None, StepOptions(data="ones", batch=6, epochs=10**6)])
def test_interrupt_during_the_send_leaves_no_busy_rank(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, name: bytes, step: StepOptions | None
) -> None:
    cluster.run("import numpy as np, time\nones = np.ones(60)\nweight = 0.0")
    dispatcher = cluster._worker_group.dispatcher
    monkeypatch.setattr(dispatcher, "_socket", InterruptedSocket(dispatcher._socket, name))
    with pytest.raises(KeyboardInterrupt):
        cluster.run("weight = weight + 1.0\nweight" if step else "time.sleep(600)", step=step)
    monkeypatch.undo()
    assert cluster.run("rank").results == ALL_RANKS


@pytest.fixture
def cells_reach_rank_0_only(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send cells to rank 0 only."""
    send = cluster._worker_group.dispatcher.send

    def filtered_send(order: Command, ranks: Iterable[int]) -> None:
        if isinstance(order, CellRequest):
            ranks = [rank for rank in ranks if not rank]
        send(order, ranks)

    monkeypatch.setattr(cluster._worker_group.dispatcher, "send", filtered_send)


@pytest.mark.usefixtures("cells_reach_rank_0_only")
def test_unreached_ranks_are_idle_after_an_error(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(nbdist.CellError, match="TypeError on rank 0@") as error:
        cluster.run("len(3)")
    monkeypatch.undo()
    assert [*error.value.notes] == ["rank 1-2: the cell had not reached this rank"]
    assert cluster.run("rank").results == ALL_RANKS


@pytest.mark.usefixtures("cells_reach_rank_0_only")
def test_unreached_ranks_end_the_cell(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(nbdist.WorkerError, match=r"rank [12]: the cell had not reached this rank"):
        cluster.run("import time\ntime.sleep(600)")
    monkeypatch.undo()
    assert cluster.run("rank").results == ALL_RANKS


def test_rank_repeats_a_lost_end_message(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, dropped = cluster._worker_group.receiver.subscribers.deliver, threading.Event()

    def intercept(record: AnyEvent) -> None:
        if isinstance(record, CellEnded) and record.rank == 1 and not dropped.is_set():
            dropped.set()
        else:
            deliver(record)

    monkeypatch.setattr(cluster._worker_group.receiver.subscribers, "deliver", intercept)
    with pytest.raises(nbdist.CellError, match="TypeError") as error:
        cluster.run("len(3)")
    assert dropped.is_set()
    assert len(error.value.notes) == 1
    assert "the same error" in error.value.notes[0]
    assert cluster.run("rank").results == ALL_RANKS


@pytest.mark.full  # tests/execution/test_cancellation.py
def test_running_rank_is_interrupted_again_before_the_next_cell(
    cluster: nbdist.Cluster,
) -> None:
    """Rank 0 ignores interrupts at first, and accepts them before the next cell."""
    cell = """
import time
if rank: raise ValueError
until = time.monotonic() + 2.5
while time.monotonic() < until:
    try:
        time.sleep(until - time.monotonic())
    except KeyboardInterrupt:
        pass
time.sleep(600)
"""
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run(cell)
    assert "rank 0: still running" in error.value.notes[-1]
    threading.Event().wait(2.5)  # no message reports that the rank accepts interrupts again
    assert cluster.run("rank").results == ALL_RANKS


def test_equal_errors_at_different_times_are_counted(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that still compute get time to raise the same error before the interrupt."""
    monkeypatch.setattr(cancellation, "_SAME_AT_MOST_S", 30.0)
    cell = """
import time
until = time.process_time() + 0.3 * (rank > 0)
while time.process_time() < until: pass
len(3)
"""
    with pytest.raises(nbdist.CellError, match="TypeError on rank 0@") as error:
        cluster.run(cell)
    assert [*error.value.notes] == ["rank 1-2: the same error"]
