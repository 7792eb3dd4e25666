"""Patch of `jax.distributed.initialize`: on a worker, the processes are already connected.

JAX raises an error at the second call. A script for several hosts contains this call, and runs
unchanged in a cell.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from nbdist.private_api.jax import distributed
from nbdist.worker.runtime import context

_upstream = distributed.initialize


def apply() -> None:
    """Let `jax.distributed.initialize` return with a note on a connected worker."""
    jax.distributed.initialize = _initialize


@functools.wraps(_upstream)
def _initialize(*args: Any, **kwargs: Any) -> None:
    if distributed.global_state.client is None or not context.in_cell():
        _upstream(*args, **kwargs)
        return
    worker = context.current()
    worker.reporter.note_once(
        "strategy",
        f"jax.distributed.initialize: already done, {jax.process_count()} processes with "
        f"{jax.device_count()} devices",
    )
