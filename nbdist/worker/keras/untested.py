"""Refusal of `fit` with a version of Keras that nbdist does not patch.

Upstream's `fit` on several workers gives other numbers than on one device: under TensorFlow, it
reads and averages batches differently, and on JAX each rank trains a model of its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nbdist.worker.runtime.tested_versions import is_tested, untested_error

if TYPE_CHECKING:
    from collections.abc import Callable

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


@functools.cache
def accepts(keras: Any) -> bool:
    """Return True if nbdist can patch this Keras. For other versions, the methods of models raise.

    Args:
        keras: the imported module.
    """
    if is_tested("Keras", keras.__version__, "workers refuse `fit`, `evaluate` and `predict`"):
        return True
    for name in METHODS:
        setattr(keras.Model, name, _refusal(name, keras.__version__))
    return False


def _refusal(name: str, version: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise untested_error(f"`{name}` on workers", "Keras", version)

    return refuse
