"""Tests that need TensorFlow are skipped on a Python for which TensorFlow has no version."""

from __future__ import annotations

import pytest

from tests import without_tensorflow

pytest_plugins = ("pytester",)

REASON = "a framework is missing"
TESTS = """
def test_of_both_frameworks():
    raise ModuleNotFoundError("No module named 'tensor" + "flow'")

def test_of_a_cluster():
    assert not "{reason}"

def test_of_numbers():
    assert 1.0 == 2.0

def test_of_jax():
    assert 1.0 == 1.0
"""


class Outcomes:
    """Plugin that stores the report of each test's call."""

    def __init__(self) -> None:
        self.reports: dict[str, pytest.TestReport] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.reports[report.nodeid.rpartition("::")[2]] = report


@pytest.mark.parametrize(("mention", "is_skipped"), [("# strategy mirrored\n", True), ("", False)])
def test_only_missing_tensorflow_skips_a_test(
    pytester: pytest.Pytester, mention: str, is_skipped: bool
) -> None:
    path = pytester.makepyfile(test_one=mention + TESTS.format(reason=REASON))
    outcomes = Outcomes()
    rule = without_tensorflow.SkipWithoutTensorFlow(REASON)
    pytest.main([str(path), "-p", "no:cacheprovider", "-q"], [rule, outcomes])
    expected = "skipped" if is_skipped else "failed"
    assert {name: one.outcome for name, one in outcomes.reports.items()} == {
        "test_of_both_frameworks": expected,
        "test_of_a_cluster": expected,
        "test_of_numbers": "failed",
        "test_of_jax": "passed",
    }
    if is_skipped:
        assert REASON in outcomes.reports["test_of_both_frameworks"].longreprtext


def test_rule_is_for_pythons_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in ("", REASON):
        monkeypatch.setattr(without_tensorflow, "lacks_tensorflow", lambda reason=reason: reason)
        manager = pytest.PytestPluginManager()
        without_tensorflow.register(manager)
        found = [type(plugin) for plugin in manager.get_plugins()]
        assert (without_tensorflow.SkipWithoutTensorFlow in found) == bool(reason)
