"""Compilers for hardware that is not there."""

from __future__ import annotations

import importlib.util

import pytest

from nbdist.planner.hardware.compiler_targets import PACKAGES


def there(platform: str) -> pytest.MarkDecorator:
    """A test that has need of the compiler for `tpu` or `cuda`."""
    found = importlib.util.find_spec(PACKAGES[platform]) is not None
    return pytest.mark.skipif(not found, reason="its compiler is in nbdist[oracle]: 1.7 GB")
