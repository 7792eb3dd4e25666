"""Clusters for the tests. Each module gets fresh engines from kept controllers and fork servers.

A start takes 2 s of one core with JAX and 5 s with TensorFlow, mostly for imports and the
controller. A restart takes 0.5 s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbdist
from nbdist.records import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_KEPT = 6
"""Maximum number of kept clusters. Each uses about 1 GB."""


@dataclass(frozen=True)
class Held:
    """Processes, threads and sockets of this process at one moment.

    Attributes:
        children: direct child processes.
        threads: threads of nbdist.
        sockets: addresses that the process listens on.
    """

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    sockets: frozenset[Any]

    @classmethod
    def now(cls) -> Held:
        process = psutil.Process()
        return cls(
            frozenset(process.children()),
            frozenset(t for t in threading.enumerate() if t.name.startswith("nbdist")),
            frozenset(c.laddr for c in process.net_connections() if c.status == "LISTEN"),
        )

    def beyond(self, other: Held) -> Held:
        return Held(
            self.children - other.children,
            self.threads - other.threads,
            self.sockets - other.sockets,
        )

    def processes(self) -> set[psutil.Process]:
        """Return the children and all their descendants."""
        below = [c.children(recursive=True) for c in self.children if c.is_running()]
        return set(self.children).union(*below)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Fail the test if a cell does not end within `seconds`, instead of a hang."""
    late = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    late.start()
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("the cell does not end")
    finally:
        late.cancel()


def interrupt_after(cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt the next cell when a rank reports a step."""
    subscribers = cluster._worker_group.receiver.subscribers
    deliver, began = subscribers.deliver, threading.Event()

    def interrupting(record: Any) -> None:
        deliver(record)
        is_late = isinstance(record, Rows) and record.last().step >= step
        if is_late and not began.is_set():
            began.set()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subscribers, "deliver", interrupting)


@dataclass(frozen=True)
class Kept:
    """A cluster that is kept for the next module, and its resources.

    Attributes:
        options: all options of its start except the number of hosts.
        running: the cluster.
        held: processes, threads and sockets of the cluster.
    """

    options: str
    running: nbdist.Cluster
    held: Held


_kept: list[Kept] = []
"""Kept clusters. The last one was used last."""


@contextlib.contextmanager
def cluster(hosts: int, **options: Any) -> Iterator[nbdist.Cluster]:
    """Provide a cluster with fresh engines. It is kept for reuse unless the body fails.

    A kept cluster of another size is resized, because a start imports the frameworks again.
    """
    key = repr(sorted(options.items()))
    if reused := _reusable(key, hosts):
        _kept.remove(reused)
        running, held = reused.running, reused.held
        if running.world_size == hosts:
            running.restart()
        else:
            running.resize(hosts)
    else:
        before = Held.now()
        running = nbdist.Cluster(hosts=hosts, **options)
        held = Held.now().beyond(before)
    try:
        yield running
    except BaseException:
        running.stop()
        raise
    _kept.append(Kept(key, running, held))
    while len(_kept) > MOST_KEPT:
        _kept.pop(0).running.stop()


def _reusable(key: str, hosts: int) -> Kept | None:
    """Return a kept cluster with these options, preferably of the same size."""
    found = [each for each in _kept if each.options == key]
    return min(found, key=lambda each: each.running.world_size != hosts, default=None)


def kept() -> list[Held]:
    """Return the resources of the clusters that are kept for the next module."""
    return [each.held for each in _kept]


def stop_all() -> None:
    while _kept:
        _kept.pop().running.stop()


def evaluate(cluster: nbdist.Cluster, cell: str) -> str:
    """Return the value of a plain cell that is equal on all ranks, empty without a value."""
    results = set(cluster.run(cell, strategy="pjrt").results.values()) or {""}
    assert len(results) == 1
    return str(results.pop())
