"""Saving to HDF5 removes the optimizer from what a Keras model was compiled with.

`saving_utils.model_metadata` removes it from the model's own dictionary. A `.keras` file that is
saved later, and `clone_model`, then name no optimizer: Keras loads the model with RMSprop, its
default, and with the state of the other optimizer. Under SGD with momentum the first update is NaN.
Where rank 0 alone writes, the ranks then differ. Seen with Keras 3.15.1, in one process too;
`tests/worker/tensorflow/saving/test_coordination.py` fails if the patch is no longer needed.
"""

from __future__ import annotations

import functools
from typing import Any

from keras.src.legacy.saving import saving_utils

_upstream = saving_utils.model_metadata


@functools.cache
def apply() -> None:
    """Keep the optimizer; to be called for versions of Keras that were tested."""
    saving_utils.model_metadata = _model_metadata


def _model_metadata(model: Any, *args: Any, **kwargs: Any) -> Any:
    compiled = vars(model).get("_compile_config")
    before = dict(compiled.config) if compiled is not None else {}
    try:
        return _upstream(model, *args, **kwargs)
    finally:
        if compiled is not None:
            compiled.config = before
