"""Patches of libraries, deferred until a cell imports the library."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from collections.abc import Callable


def once_imported(name: str, do: Callable[[], None]) -> None:
    """Call `do` now if the module is loaded, else right after its first import.

    An exception of `do` is then raised by the import.
    """
    if name in sys.modules:
        do()
    else:
        wrapt.register_post_import_hook(lambda _module: do(), name)
