"""Patch of Keras: saving to HDF5 removes the optimizer from a model's compile settings.

`saving_utils.model_metadata` removes it from the model's own dictionary. A `.keras` file saved
later, and `clone_model`, then contain no optimizer. Keras loads such a model with its default,
RMSprop, and with the state of the other optimizer. After SGD with momentum, the first update is
NaN. If only rank 0 writes, the ranks then differ. Observed with Keras 3.15.1, also in a single
process. `tests/worker/tensorflow/saving/test_coordination.py` fails if the patch is no longer
needed.
"""

from __future__ import annotations

import functools
from typing import Any

from nbdist.private_api.keras import saving_utils

_upstream = saving_utils.model_metadata


@functools.cache
def apply() -> None:
    """Keep the optimizer while saving. Call it only for tested versions of Keras."""
    saving_utils.model_metadata = _model_metadata


def _model_metadata(model: Any, *args: Any, **kwargs: Any) -> Any:
    compiled = vars(model).get("_compile_config")
    before = dict(compiled.config) if compiled is not None else {}
    try:
        return _upstream(model, *args, **kwargs)
    finally:
        if compiled is not None:
            compiled.config = before
