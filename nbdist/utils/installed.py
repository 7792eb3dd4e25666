"""Folders of installed packages, and files of the user outside of them."""

from __future__ import annotations

import functools
import os
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
    is_library = module.partition(".")[0] in _LIBRARIES or path.startswith(INSTALLED)
    return not is_library and _PACKAGES.isdisjoint(Path(path).parts)
