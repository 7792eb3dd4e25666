"""Folders of installed packages, and files of the user outside of them."""

from __future__ import annotations

import functools
import os
import re
import site
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
