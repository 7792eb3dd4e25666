"""The IPython shell of this engine."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython


def engine_shell() -> Any:
    """Return ipykernel's shell, whose namespace is the user's. Call it only in an engine."""
    return get_ipython()
