"""Refusal of `fit` with a version of a library that nbdist does not patch.

Upstream's `fit` on several workers gives other numbers than on one device: under TensorFlow, it
reads and averages batches differently, and on JAX each rank trains a model of its own.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from nbdist.errors import LibraryVersionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.private_api.features import Feature

METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

_log = logging.getLogger(__name__)


@functools.cache
def accepts(keras: Any, *features: Feature) -> bool:
    """Return True if all features are supported. Otherwise, the methods of models raise.

    Args:
        keras: the imported module.
        features: features of Keras and of its framework that `fit` needs.
    """
    try:
        for feature in features:
            feature.check()
    except LibraryVersionError as error:
        _log.warning("workers refuse `fit`, `evaluate` and `predict`: %s", error)
        for name in METHODS:
            setattr(keras.Model, name, _refusal(str(error)))
        return False
    return True


def _refusal(reason: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise LibraryVersionError(reason)

    return refuse
