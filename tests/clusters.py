"""Clusters for the tests. Each module gets fresh engines from kept controllers and fork servers.

A start takes 10 s of one core, mostly for imports and the controller. A restart takes 1 s.
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


_kept: dict[str, tuple[nbdist.Cluster, Held]] = {}


@contextlib.contextmanager
def cluster(**options: Any) -> Iterator[nbdist.Cluster]:
    """Provide a cluster with fresh engines. It is kept for reuse unless the body fails."""
    key = repr(sorted(options.items()))
    if key in _kept:
        running, held = _kept.pop(key)
        running.restart()
    else:
        before = Held.now()
        running = nbdist.Cluster(**options)
        held = Held.now().beyond(before)
    try:
        yield running
    except BaseException:
        running.stop()
        raise
    _kept[key] = running, held
    while len(_kept) > MOST_KEPT:
        _kept.pop(next(iter(_kept)))[0].stop()


def kept() -> list[Held]:
    """Return the resources of the clusters that are kept for the next module."""
    return [held for _, held in _kept.values()]


def stop_all() -> None:
    while _kept:
        _kept.popitem()[1][0].stop()


def evaluate(cluster: nbdist.Cluster, cell: str) -> str:
    """Return the value of a plain cell that is equal on all ranks, empty without a value."""
    results = set(cluster.run(cell, strategy="pjrt").results.values()) or {""}
    assert len(results) == 1
    return str(results.pop())
