"""Version of nbdist, equal to that in pyproject.toml."""

from __future__ import annotations

__version__ = "0.2.0"
