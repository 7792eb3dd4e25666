"""Engines of nbdist and as many of ipyparallel, in one notebook kernel."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import TYPE_CHECKING

from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale

START = """
import logging, time, ipyparallel as ipp
%load_ext nbdist
%dist_start {engines} --framework jax
peer = ipp.Cluster(n={engines}, log_level=logging.ERROR)
client = peer.start_and_connect_sync()
view = client[:]
view.block = True
view.activate()
from IPython import get_ipython
def ours(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("dist_run", "", cell)
    return time.perf_counter() - start
def theirs(cell):
    start = time.perf_counter()
    get_ipython().run_cell_magic("px", "", cell)
    return time.perf_counter() - start
"""

STOP = "%dist_stop\nclient.close()\npeer.stop_cluster_sync()"


_shared = contextlib.ExitStack()


@contextlib.contextmanager
def kernel(scale: Scale, engines: int) -> Iterator[Kernel]:
    """Start a kernel with both clusters. It contains `ours` and `theirs`: seconds of a cell.

    Cases of a smoke run share the kernel. `stop_shared` stops it.
    """
    if scale.smoke:
        yield _shared_kernel(engines)
        return
    with _started(engines) as running:
        yield running


def stop_shared() -> None:
    _shared_kernel.cache_clear()
    _shared.close()


@cache
def _shared_kernel(engines: int) -> Kernel:
    return _shared.enter_context(_started(engines))


@contextlib.contextmanager
def _started(engines: int) -> Iterator[Kernel]:
    with Kernel() as running:
        running.run(START.format(engines=engines)).check()
        yield running
        running.run(STOP).check()
