"""Communication between JAX's processes besides the training.

`gather`, `agree` and `chiefs` are collective: every process must call them at the same point.
`announce` and `await_announced` are not: one process publishes a value, and others wait for it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from nbdist.private_api.jax import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
"""Argument of `jax.set_mesh` for no context mesh. Before JAX 0.10, it refuses None."""

_POLL_S = 0.02
_HOST = "nbdist/host/"


def gather(tree: Any) -> Any:
    """Gather a tree: each array of shape `(...)` becomes NumPy's of shape `(processes, ...)`."""
    if jax.process_count() == 1:
        return jax.tree.map(lambda array: np.asarray(array)[None], tree)
    with _context_mesh_restored():
        return multihost_utils.process_allgather(tree)


def agree(numbers: Sequence[int]) -> np.ndarray:
    """Gather the numbers of every process as 32-bit integers, shape `(processes, numbers)`."""
    gathered: np.ndarray = gather(np.asarray(numbers, np.uint32))
    return gathered


def chiefs(tree: Any) -> Any:
    """Return process 0's arrays on every process; all processes pass the same shapes."""
    with _context_mesh_restored():
        return multihost_utils.broadcast_one_to_all(tree)


@contextlib.contextmanager
def _context_mesh_restored() -> Iterator[None]:
    """Restore the context mesh after a collective of JAX, which sets one of its own.

    If it is cancelled, the waiting interrupt arrives in the method that would reset the mesh.
    """
    mesh = jax.sharding.get_mesh()
    try:
        yield
    finally:
        if jax.sharding.get_mesh() != mesh:
            jax.set_mesh(mesh)


def announce(key: str, value: str = "") -> None:
    """Publish a value under `key` to the other processes; does nothing if there are none."""
    client = distributed.global_state.client
    if client is not None:
        client.key_value_set(key, value, allow_overwrite=True)


def announced(key: str) -> str | None:
    """Return the value published under `key`; None if no process has published one."""
    client = distributed.global_state.client
    if client is None:
        return None
    try:
        value: str = client.key_value_try_get(key)
    except JaxRuntimeError:
        return None
    return value


def announce_host() -> None:
    """Publish the host of this process; see `hosts`."""
    announce(f"{_HOST}{jax.process_index()}", socket.gethostname())


def hosts() -> list[str]:
    """Return the host name of each process, the same list on all.

    A process that has not published its host counts as a host of its own, such as `process-3`. This
    is the case in a script that joined JAX's processes itself.
    """
    if jax.process_count() == 1:
        return [socket.gethostname()]
    names = [announced(f"{_HOST}{process}") for process in range(jax.process_count())]
    return [name or f"process-{process}" for process, name in enumerate(names)]


def await_announced(key: str, timeout_s: float) -> bool:
    """Wait until a process has published `key`; the wait can be interrupted.

    Returns:
        Whether the key was published within `timeout_s` seconds.
    """
    client = distributed.global_state.client
    deadline = time.monotonic() + timeout_s
    while client is not None and announced(key) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
