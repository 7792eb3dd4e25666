"""What is done to a library once a cell imports it: nobody waits for one that no cell uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from collections.abc import Callable


def once_imported(name: str, do: Callable[[], None]) -> None:
    """Do it now, if the module is there, else as soon as it has been imported, by whom it may be.

    An exception becomes one of the import.
    """
    if name in sys.modules:
        do()
    else:
        wrapt.register_post_import_hook(lambda _module: do(), name)
