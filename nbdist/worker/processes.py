"""What JAX's processes tell each other from host to host, beside the training.

Every process has to call `agree` and the like at the same place. `announce` and `await_announced`
do not meet: one process tells, and whoever asks waits.
"""

from __future__ import annotations

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


def announce(key: str) -> None:
    """Tell the other processes that `key` has come; a no-op where there are none."""
    client = distributed.global_state.client
    if client is not None:
        client.key_value_set(key, "", allow_overwrite=True)


def await_announced(key: str, timeout_s: float) -> bool:
    """Wait until a process has announced `key`; an interrupt gets through.

    Returns:
        Whether it has come within `timeout_s`.
    """
    client = distributed.global_state.client
    deadline = time.monotonic() + timeout_s
    while client is not None:
        try:
            client.key_value_try_get(key)
        except JaxRuntimeError:  # not yet
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            break
    return True
