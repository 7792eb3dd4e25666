"""Versions of the environments of `make test-versions`, and the table of their results."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from nbdist.private_api.tested_versions import TESTED
from nbdist.utils import installed
from tools import version_matrix
from tools.version_matrix import Outcomes

REQUIREMENTS = tuple(map(Requirement, version_matrix.requirements()))
ENVIRONMENTS = {
    "oldest": version_matrix.PINS / "oldest.txt",
    "middle": version_matrix.PINS / "middle.txt",
    **dict.fromkeys(("newest", *version_matrix.PYTHONS), version_matrix.ROOT / "constraints.txt"),
}
PYTHONS = {name: name.removeprefix("python") for name in version_matrix.PYTHONS}
DISTRIBUTIONS = {"Orbax": "orbax-checkpoint"}


def pins(name: str) -> dict[str, str]:
    lines = ENVIRONMENTS[name].read_text(encoding="utf-8").splitlines()
    python = {"python_version": PYTHONS.get(name, "3.11")}
    found = [
        one for one in map(Requirement, lines) if not one.marker or one.marker.evaluate(python)
    ]
    return {one.name.lower(): str(one.specifier).removeprefix("==") for one in found}


def test_lower_bounds_are_the_oldest_tested_versions() -> None:
    oldest = pins("oldest")
    tested = [one for one in REQUIREMENTS if one.name not in version_matrix.TEST_PACKAGES]
    bounds = {
        one.name: Version(bound.version)
        for one in tested
        for bound in one.specifier
        if bound.operator == ">="
    }
    assert bounds == {one.name: Version(oldest[one.name]) for one in tested}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_versions_of_an_environment_are_within_the_bounds(name: str) -> None:
    pinned = pins(name)
    assert all("/" not in version for version in pinned.values())
    for one in REQUIREMENTS:
        if one.name in pinned:
            assert one.specifier.contains(pinned[one.name]), one


def test_every_supported_python_has_an_environment() -> None:
    text = (version_matrix.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    assert {f"python{version}" for version in supported[1:]} == set(version_matrix.PYTHONS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_patches_apply_to_the_versions_of_an_environment(name: str) -> None:
    pinned = pins(name)
    for library, series in TESTED.items():
        version = pinned.get(DISTRIBUTIONS.get(library, library.lower()))
        assert version is None or version.startswith(series), library


def test_files_of_the_smoke_set_exist() -> None:
    for tests in version_matrix.SMOKE.values():
        assert all((version_matrix.ROOT / test).exists() for test in tests)


def test_failed_tests_are_counted_by_feature(tmp_path: Path) -> None:
    lacks = f"{version_matrix.WITHOUT_TENSORFLOW} 3.14: use JAX"
    cases = (
        ("tests.end_to_end.test_session", ""),
        ("tests.end_to_end.test_session", "<failure/>"),
        ("tests.worker.jax.test_orbax_patch", "<error/>"),
        ("tests.worker.jax.test_orbax_patch", "<skipped message='PyTorch is not installed'/>"),
        ("tests.end_to_end.test_steps", f"<skipped message='{lacks}'/>"),
        ("tests.end_to_end.test_recovery.TestGroup", ""),
    )
    lines = (f'<testcase classname="{module}" name="a">{end}</testcase>' for module, end in cases)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{''.join(lines)}</testsuite>", encoding="utf-8")
    counted = version_matrix.counts(report)
    assert {name: counts for name, counts in counted.items() if any(counts)} == {
        "start, plain cells, tracebacks": (1, 1, 0),
        "recovery": (1, 0, 0),
        "checkpoints": (0, 1, 0),
        "step cells, both strategies": (0, 0, 1),
    }


VERSIONS = dict.fromkeys(version_matrix.LIBRARIES, "1.2")


def test_table_has_a_column_for_each_environment() -> None:
    passed = version_matrix.column(VERSIONS, dict.fromkeys(version_matrix.SMOKE, Outcomes(2)))
    failed = version_matrix.column(VERSIONS, dict.fromkeys(version_matrix.SMOKE, Outcomes(2, 1, 3)))
    lines = version_matrix.table({"newest": failed, "oldest": passed})
    assert lines[0] == "|  | oldest | newest |"
    assert "| keras | 1.2 | 1.2 |" in lines
    assert "| recovery | 2 passed | 2 passed, **1 failed**, 3 not run (TensorFlow) |" in lines


def test_columns_of_other_environments_stay_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "versions.md"
    document.write_text(version_matrix.DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    head, _, before = document.read_text(encoding="utf-8").partition(version_matrix.TITLE)
    monkeypatch.setattr(version_matrix, "DOCUMENT", document)
    monkeypatch.setattr(version_matrix, "environment", lambda _: None)
    monkeypatch.setattr(version_matrix, "versions", lambda _: VERSIONS)
    counts = dict.fromkeys(version_matrix.SMOKE, Outcomes(3, 1))
    monkeypatch.setattr(version_matrix, "run", lambda *_: counts)
    assert version_matrix.main(["python3.13"])
    made, _, after = document.read_text(encoding="utf-8").partition(version_matrix.TITLE)
    assert made == head
    old, new = map(version_matrix.columns_of, (before, after))
    assert set(old) | {"python3.13"} == set(new)
    assert new.pop("python3.13") == version_matrix.column(VERSIONS, counts)
    assert {name: column for name, column in old.items() if name in new} == new


def test_tests_that_need_tensorflow_are_counted_by_the_reason_of_their_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "_PYTHON", (3, 14))
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda _: None)
    assert version_matrix.WITHOUT_TENSORFLOW in installed.lacks_tensorflow()


@pytest.mark.processes
def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_matrix, "PACKAGES", ("pytest", "nbdist-no-package"))
    monkeypatch.setattr(version_matrix, "LIBRARIES", ("Python", "pytest", "other"))
    found = version_matrix.versions(Path(sys.executable))
    assert found == {
        "Python": platform.python_version(),
        "pytest": pytest.__version__,
        "other": "-",
    }
