"""Early import of the packages that take most of the time of Keras's import.

They do not decide the backend. Of the 1.8 s of one core for Keras 3.15, 0.25 s remain.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in ("sklearn.base", "matplotlib.pyplot"):
    with contextlib.suppress(ImportError):  # Keras works without them
        importlib.import_module(_name)
