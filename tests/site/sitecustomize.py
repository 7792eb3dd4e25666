"""Import hook that hides scikit-learn and Matplotlib from Keras in all processes of the tests.

Keras imports both if they are installed, which takes half of its own import. nbdist and its tests
do not use the parts of Keras that need them. Cells still import them.

Python imports this module at its start, because `tests/conftest.py` adds its folder to PYTHONPATH.
It imports nothing else, because every process of the tests pays for it.
"""

from __future__ import annotations

import sys

HIDDEN = ("sklearn", "matplotlib")
IMPORTER = "keras.src."


class OptionalPackages:
    """Finder that refuses the packages of `HIDDEN` to modules of Keras."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in HIDDEN and _is_for_keras():
            raise ModuleNotFoundError(f"the tests hide {name} from Keras", name=name)


def _is_for_keras() -> bool:
    """Return True if a module of Keras requests the import that is under way."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return bool(frame) and frame.f_globals.get("__name__", "").startswith(IMPORTER)


sys.meta_path.insert(0, OptionalPackages)
