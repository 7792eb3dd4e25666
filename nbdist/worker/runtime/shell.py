"""The IPython shell of this engine."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython


def engine_shell() -> Any:
    """Ipykernel's shell, whose namespace is the user's; code of ours runs only inside of one."""
    return get_ipython()
