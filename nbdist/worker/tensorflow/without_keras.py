"""TensorFlow, imported without Keras: importing this module imports it.

TensorFlow 2.21 imports Keras at the end of its own import, and with it whatever backend Keras has
by then. `None` in `sys.modules` makes that one import fail, which TensorFlow expects where Keras is
not installed. Whoever imports Keras later, or looks up `tf.keras`, gets all of it.
"""

from __future__ import annotations

import importlib
import sys

_IMPORTED_LAST = "keras.src.optimizers"

if "tensorflow" not in sys.modules and "keras" not in sys.modules:
    sys.modules[_IMPORTED_LAST] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tensorflow")
    finally:
        del sys.modules[_IMPORTED_LAST]
