"""Identity, liveness and end of processes, of this one and of processes that never existed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from nbdist.utils.processes import (
    await_ends,
    cause_of,
    is_alive,
    is_gone,
    process_of,
    queued_s,
    this_process,
)

NEVER = 2**22 + 1
"""Pid beyond Linux's maximum."""


class Ending:
    """Double of a process that ends after some queries.

    Args:
        queries: number of queries that find it running.
        status: status while it runs.
    """

    def __init__(self, queries: int, status: str = psutil.STATUS_RUNNING) -> None:
        self.queries = queries
        self._status = status

    def is_running(self) -> bool:
        self.queries -= 1
        return self.queries >= 0

    def status(self) -> str:
        return self._status


class Vanishing(Ending):
    """Double of a process that ends between two queries."""

    def status(self) -> str:
        raise psutil.NoSuchProcess(1)


def test_this_process_is_not_gone() -> None:
    own = this_process()
    assert own == process_of(os.getpid())
    assert own.pid == os.getpid()
    assert not is_gone(own)
    assert process_of(NEVER) is None
    assert is_gone(msgspec.structs.replace(own, pid=NEVER))


@pytest.mark.parametrize(
    ("difference_s", "is_other"), [(-0.4, False), (0.4, False), (-0.6, True), (0.6, True)]
)
def test_a_pid_with_another_start_time_belongs_to_another_process(
    difference_s: float, is_other: bool
) -> None:
    own = this_process()
    assert is_gone(msgspec.structs.replace(own, started=own.started + difference_s)) is is_other


def test_a_process_on_another_host_is_assumed_to_run() -> None:
    assert not is_gone(msgspec.structs.replace(this_process(), host="elsewhere", pid=NEVER))


def test_a_zombie_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_alive(psutil.Process())
    assert not is_alive(Ending(0))  # type: ignore[arg-type]
    assert not is_alive(Vanishing(1))  # type: ignore[arg-type]
    assert not is_alive(Ending(1, psutil.STATUS_ZOMBIE))  # type: ignore[arg-type]
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_ZOMBIE)
    assert is_gone(this_process())


def test_processes_that_still_run_are_returned_after_the_timeout() -> None:
    own = psutil.Process()
    assert await_ends([own, Ending(0)], 0.0) == [own]  # type: ignore[list-item]
    assert await_ends([], 60.0) == []


def test_the_wait_ends_with_the_last_process() -> None:
    began = time.monotonic()
    assert await_ends([Ending(1), Ending(3)], 60.0) == []  # type: ignore[list-item]
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "its process ended with exit code 0"),
        (3, "its process ended with exit code 3"),
        (-signal.SIGSEGV, "its process was killed by signal 11 (Segmentation fault)"),
    ],
)
def test_the_cause_of_an_end_is_described(code: int, cause: str) -> None:
    assert cause_of(code) == cause
    assert "ran out of memory" in cause_of(-signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the time in queues")
def test_time_in_the_queue_of_a_processor_is_counted() -> None:
    """Two busy threads share a processor: one of them waits."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            before, deadline = queued_s(), time.monotonic() + 60
            while queued_s() <= before and time.monotonic() < deadline:
                sum(range(100_000))
            other.kill()
        assert queued_s() > before
    finally:
        os.sched_setaffinity(0, allowed)
