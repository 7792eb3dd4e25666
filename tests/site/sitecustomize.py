"""Import hook that hides optional packages from libraries in all processes of the tests.

Keras imports scikit-learn and Matplotlib if they are installed, which takes half of its own import.
jsonschema imports rfc3987_syntax for the format `iri`, which takes 1.1 s of CPU time in each
notebook server. nbdist and its tests do not use these parts of the libraries. Cells still import
the packages.

Python imports this module at its start, because `tests/conftest.py` adds its folder to PYTHONPATH.
It imports nothing else, because every process of the tests pays for it.
"""

from __future__ import annotations

import sys

HIDDEN = {"sklearn": "keras.src.", "matplotlib": "keras.src.", "rfc3987_syntax": "jsonschema."}
"""Prefix of the modules from which each package is hidden."""


class OptionalPackages:
    """Finder that refuses the packages of `HIDDEN` to the modules named there."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in HIDDEN and _importer().startswith(HIDDEN[name]):
            raise ModuleNotFoundError(f"the tests hide {name}", name=name)


def _importer() -> str:
    """Return the name of the module that requests the import that is under way."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, OptionalPackages)
