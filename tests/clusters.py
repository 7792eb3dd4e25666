"""Clusters for the tests: a module's engines are fresh, what they are forked from is kept.

Each start costs 10 s of a core, most of them for imports and the controller; a restart one.
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
"""Each takes about a gigabyte."""


@dataclass(frozen=True)
class Held:
    """What of this process and below it there is at a moment.

    Attributes:
        children: processes that it started itself.
        threads: nbdist's.
        sockets: addresses that it listens on.
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
        """The children and all below them."""
        below = [c.children(recursive=True) for c in self.children if c.is_running()]
        return set(self.children).union(*below)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """A cell that does not end within so many seconds fails its test, and does not hang it."""
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
    """A cluster with fresh engines, as `nbdist.Cluster` makes it; one that failed is not kept."""
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
    """What the clusters hold that wait for the next module."""
    return [held for _, held in _kept.values()]


def stop_all() -> None:
    while _kept:
        _kept.popitem()[1][0].stop()
