"""Folders of installed packages, files of the user outside of them, and missing frameworks."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import site
import sys
import sysconfig
from pathlib import Path

INSTALLED = (
    *(*site.getsitepackages(), site.getusersitepackages()),
    *(sysconfig.get_path("stdlib"), f"{Path(__file__).parents[1]}{os.sep}"),
)
"""Folders of installed packages, of Python itself, and of nbdist."""

_LIBRARIES = {
    *("tensorflow", "keras", "jax", "jaxlib", "flax", "optax", "equinox", "orbax", "numpy"),
    *("nbdist", "IPython", "ipykernel", "ipyparallel"),
}
"""Packages that are not the user's, even if they are installed from a folder (`pip install -e`)."""

_PACKAGES = {"site-packages", "dist-packages"}
"""Names of folders of packages, also of those on `PYTHONPATH`."""

_PYTHON = sys.version_info[:2]
_FIRST_WITHOUT_TENSORFLOW = (3, 14)
"""First Python for which TensorFlow 2.21 has no wheel. `pyproject.toml` has the same limit."""


@functools.cache
def is_users_file(module: str, path: str) -> bool:
    """Return True if the file of a module belongs to no installed package."""
    package = module.partition(".")[0]
    if package in _LIBRARIES or path.startswith(INSTALLED):
        return False
    file = Path(path)
    if not _PACKAGES.isdisjoint(file.parts):
        return False
    depth = module.count(".") + (file.stem == "__init__")
    folder = [file, *file.parents][min(depth + 1, len(file.parents))]
    return package not in _installed_into(folder)


@functools.cache
def _installed_into(folder: Path) -> frozenset[str]:
    """Return the modules that pip installed into a folder of any name (`pip install --target`)."""
    records = (record.read_text(errors="replace") for record in folder.glob("*.dist-info/RECORD"))
    lines = (line for text in records for line in text.splitlines())
    return frozenset(re.split(r"[/,.]", line, maxsplit=1)[0] for line in lines)


def lacks_tensorflow() -> str:
    """Return why TensorFlow cannot be installed for this Python. Empty if it is here, or can be."""
    if _PYTHON < _FIRST_WITHOUT_TENSORFLOW or importlib.util.find_spec("tensorflow") is not None:
        return ""
    major, minor = _FIRST_WITHOUT_TENSORFLOW
    return (
        f"TensorFlow has no version for Python {'.'.join(map(str, _PYTHON))}: use JAX "
        "(--framework jax, --strategy pjrt), which also trains Keras models, or Python "
        f"{major}.{minor - 1}"
    )
