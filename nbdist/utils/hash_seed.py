"""Seed of Python's hashes. It decides the order of sets of texts, which all ranks need."""

from __future__ import annotations

import os

VARIABLE = "PYTHONHASHSEED"
"""Variable that Python reads when it starts."""


def value() -> str:
    """Return the seed for new processes: the number in this process's environment, else 0."""
    given = os.environ.get(VARIABLE, "")
    return given if given.isdecimal() else "0"
