"""Compilers for hardware that is not there."""

from __future__ import annotations

import pytest

from nbdist.planner.hardware.compiler_targets import is_compiler_installed


def there(platform: str) -> pytest.MarkDecorator:
    """A test that has need of the compiler for `tpu` or `cuda`."""
    missing = not is_compiler_installed(platform)
    return pytest.mark.skipif(missing, reason="its compiler is in nbdist[oracle]: 1.7 GB")
