"""What JAX's processes tell each other from host to host, beside the training.

Every process has to call `agree` and the like at the same place. `announce` and `await_announced`
do not meet: one process tells, and whoever asks waits.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax._src import distributed
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S = 0.02
_HOST = "nbdist/host/"


def gather(tree: Any) -> Any:
    """The same tree with each array of shape (...) as NumPy's of shape (processes, ...)."""
    if jax.process_count() == 1:
        return jax.tree.map(lambda array: np.asarray(array)[None], tree)
    return multihost_utils.process_allgather(tree)


def agree(numbers: Sequence[int]) -> np.ndarray:
    """Every process's numbers, of shape (processes, numbers); they are taken as 32 bits."""
    gathered: np.ndarray = gather(np.asarray(numbers, np.uint32))
    return gathered


def chiefs(tree: Any) -> Any:
    """Process 0's arrays, on every process; the others' have the same shapes."""
    return multihost_utils.broadcast_one_to_all(tree)


def announce(key: str, value: str = "") -> None:
    """Tell the other processes that `key` has come; a no-op where there are none."""
    client = distributed.global_state.client
    if client is not None:
        client.key_value_set(key, value, allow_overwrite=True)


def announced(key: str) -> str | None:
    """What a process has announced as `key`; None where none has yet."""
    client = distributed.global_state.client
    if client is None:
        return None
    try:
        said: str = client.key_value_try_get(key)
    except JaxRuntimeError:
        return None
    return said


def announce_host() -> None:
    """Tell the others on which host this process is; see `hosts`."""
    announce(f"{_HOST}{jax.process_index()}", socket.gethostname())


def hosts() -> list[str]:
    """The host of each process by name, the same list on all; `process-3` where one has not said.

    In a script that joined JAX's processes itself none has, and each counts as a host.
    """
    if jax.process_count() == 1:
        return [socket.gethostname()]
    said = [announced(f"{_HOST}{process}") for process in range(jax.process_count())]
    return [name or f"process-{process}" for process, name in enumerate(said)]


def await_announced(key: str, timeout_s: float) -> bool:
    """Wait until a process has announced `key`; an interrupt gets through.

    Returns:
        Whether it has come within `timeout_s`.
    """
    client = distributed.global_state.client
    deadline = time.monotonic() + timeout_s
    while client is not None and announced(key) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
