"""Skip of tests that need TensorFlow, on a Python for which TensorFlow has no version.

No list or mark names these tests. A test counts as skipped if it failed because TensorFlow is
missing and its file or its id mentions TensorFlow, Keras or the mirrored strategy. In other files
the test fails, because nbdist must not need TensorFlow for JAX.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from nbdist.utils.installed import lacks_tensorflow

if TYPE_CHECKING:
    from collections.abc import Generator

_MENTIONS = re.compile(r"tensorflow|keras|mirrored|\btf\b", re.IGNORECASE)
_MISSING = "No module named 'tensorflow'"


class SkipWithoutTensorFlow:
    """Hook that replaces the failure of such a test by a skip with its reason.

    Args:
        reason: reason why TensorFlow cannot be installed.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and self.is_cause(report.longreprtext) and needs_tensorflow(item):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {self._reason}")
        return report

    def is_cause(self, error: str) -> bool:
        """Return True if the text of an error states that TensorFlow is missing."""
        return _MISSING in error or self._reason in error


def needs_tensorflow(item: pytest.Item) -> bool:
    """Return True if a test, by its id or file, is about more than JAX."""
    text = item.path.read_text(encoding="utf-8")
    return bool(_MENTIONS.search(item.nodeid) or _MENTIONS.search(text))


def register(manager: pytest.PytestPluginManager) -> None:
    """Add the hook on a Python for which TensorFlow has no version."""
    if reason := lacks_tensorflow():
        manager.register(SkipWithoutTensorFlow(reason))
