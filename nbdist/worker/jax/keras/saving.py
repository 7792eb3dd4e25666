"""Save a Keras model that several JAX processes train: rank 0 writes, and the others wait.

Without this patch every process would write the same file at once. Saving is no collective
operation, so rank 0 may save alone, unless variables are sharded. When `save` returns on another
rank, the file is complete on a shared file system. `tests/worker/jax/keras/test_fit.py` fails when
Keras does this itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StrategyError
from nbdist.private_api.keras import legacy_h5_format, saving_lib
from nbdist.worker.jax.keras import layout as keras_layout
from nbdist.worker.jax.keras import patch as keras_patch
from nbdist.worker.jax.runtime import processes
from nbdist.worker.keras import hdf5

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT_S = 600
_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)
_saved: Counter[str] = Counter()


@functools.cache
def apply() -> None:
    """Wrap the functions behind `model.save`, `model.save_weights` and checkpoints."""
    hdf5.apply()
    for module, name in _WRITERS:
        setattr(module, name, _by_chief(getattr(module, name)))


def _by_chief(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def wrapped(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if keras_patch.current() is None or jax.process_count() == 1:
            return write(model, filepath, *args, **kwargs)
        _saved[str(filepath)] += 1
        key = f"nbdist/saved/{_saved[str(filepath)]}/{filepath}"
        is_chief = jax.process_index() == 0
        with keras_layout.read_by_all(model, keep=is_chief):
            if is_chief:
                write(model, filepath, *args, **kwargs)
        if is_chief:
            processes.announce(key)
        elif not processes.await_announced(key, _WAIT_S):
            raise StrategyError(
                f"rank 0 did not save {filepath} within {_WAIT_S} s: call save on every rank, or "
                "on rank 0 alone"
            )
        return None

    return wrapped
