"""Import TensorFlow without Keras. An import of this module runs the import of TensorFlow.

TensorFlow 2.21 imports Keras at the end of its own import, with the backend that Keras has at that
time. `None` in `sys.modules` makes that one import fail. TensorFlow expects this failure if Keras
is not installed. A later import of Keras or lookup of `tf.keras` works as usual.
"""

from __future__ import annotations

import importlib
import sys

from nbdist.private_api.keras import LIBRARY

_IMPORTED_LAST = LIBRARY.path("optimizers")

if "tensorflow" not in sys.modules and "keras" not in sys.modules:
    sys.modules[_IMPORTED_LAST] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tensorflow")
    finally:
        del sys.modules[_IMPORTED_LAST]
