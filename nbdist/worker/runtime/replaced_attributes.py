"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Replace an attribute of a module or class while the context lasts.

    Args:
        owner: the module or class.
        name: name of the attribute; it may be inherited or new.
        ours: temporary value.
    """
    own = name in vars(owner)
    upstream = vars(owner).get(name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, upstream)
        else:
            delattr(owner, name)
