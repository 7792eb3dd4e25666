"""Compilers for hardware that is not present."""

from __future__ import annotations

import pytest

from nbdist.planner.hardware.compiler_targets import is_compiler_installed


def there(platform: str) -> pytest.MarkDecorator:
    """Skip a test if the compiler for `tpu` or `cuda` is not installed."""
    missing = not is_compiler_installed(platform)
    return pytest.mark.skipif(missing, reason="needs the compiler of nbdist[oracle] (1.7 GB)")
