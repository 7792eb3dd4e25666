"""Lists in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def listed(texts: Sequence[str], most: int) -> str:
    """Join the first texts, and count the others: `a, b and 1,200 more`."""
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest:,} more" if rest > 0 else "")
