"""Run a smoke set with the oldest, middle and newest versions, and write docs/versions.md.

Run `python -m tools.version_matrix [oldest] [middle] [newest] [python3.12] ...`. Without
arguments, all run. The first two get environments of their own under `build/versions`, with the
versions of `tools/versions`. The newest versions are those of the running Python. `python3.12`,
`python3.13` and `python3.14` run the newest versions on another Python, if it is on the path. JAX
is newer there, and TensorFlow has no version for Python 3.14. An environment that does not run
keeps its column of the document.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "versions"
PINS = ROOT / "tools" / "versions"
PYTHONS = ("python3.12", "python3.13", "python3.14")
"""Further interpreters for the newest versions."""

NAMES = ("oldest", "middle", "newest", *PYTHONS)
TITLE = "## Results"

SMOKE = {
    "start, plain cells, tracebacks": (
        "tests/end_to_end/test_session.py",
        "tests/worker/test_ipykernel_patch.py",
        "tests/worker/jax/runtime/test_coordinator.py",
    ),
    "magics and views in a kernel": ("tests/magics/test_dist.py",),
    "step cells, both strategies": ("tests/end_to_end/test_steps.py",),
    "models, both strategies": ("tests/end_to_end/test_models.py",),
    "`fit`, mirrored": ("tests/worker/tensorflow/test_strategy.py",),
    "`fit`, pjrt": ("tests/worker/jax/keras/test_fit.py",),
    "interrupt and stop": (
        "tests/end_to_end/test_step_interrupt.py",
        "tests/end_to_end/test_live_run_stop.py",
    ),
    "recovery": ("tests/end_to_end/test_recovery.py",),
    "live run": ("tests/end_to_end/test_live_run.py",),
    "checkpoints": (
        "tests/end_to_end/test_checkpoints.py",
        "tests/worker/jax/test_orbax_patch.py",
    ),
}
"""Features, and the files with their tests."""

EXTRAS = ("tensorflow", "jax", "export")
TEST_PACKAGES = ("equinox", "flax", "hypothesis", "nbclient", "optax", "pandas", "pytest")
TEST_PACKAGES += ("scikit-learn",)
"""Packages of the extra `dev` that the tests of `SMOKE` import."""

PACKAGES = ("tensorflow", "keras", "jax", "ipykernel", "ipython", "ipyparallel")
LIBRARIES = ("Python", *PACKAGES)
"""Rows of the table with versions."""

DATE = "date"
ROWS = (*LIBRARIES, *SMOKE, DATE)
NONE = "-"
"""Text of a row that an environment has no result for."""

WITHOUT_TENSORFLOW = "TensorFlow has no version for Python"
"""Text in the reason of tests that `tests/without_tensorflow.py` skips."""


class Outcomes(NamedTuple):
    """Numbers of the tests of a feature. `unavailable` ones need TensorFlow, which is not there."""

    passed: int
    failed: int = 0
    unavailable: int = 0


def main(names: list[str]) -> int:
    has_failed = False
    for name in names or filter(is_installed, NAMES):
        python = environment(name)
        found, tests = versions(python), run(name, python)
        has_failed |= any(one.failed for one in tests.values())
        head, _, rows = DOCUMENT.read_text(encoding="utf-8").partition(TITLE)
        columns = {**columns_of(rows), name: column(found, tests)}
        text = "\n".join(table(columns))
        DOCUMENT.write_text(f"{head.rstrip()}\n\n{TITLE}\n\n{text}\n", encoding="utf-8")
        sys.stdout.write(f"{text}\n")
    return has_failed


def is_installed(name: str) -> bool:
    return name not in PYTHONS or shutil.which(name) is not None


def environment(name: str) -> Path:
    """Return the Python of an environment, with nbdist and the packages installed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    if name == "newest":
        return Path(sys.executable)
    python = BUILD / name / "bin" / "python"
    if not python.exists():
        interpreter = name if name in PYTHONS else sys.executable
        subprocess.run([interpreter, "-m", "venv", BUILD / name], check=True)
    pins = ROOT / "constraints.txt" if name in PYTHONS else PINS / f"{name}.txt"
    options = ["--quiet", "--disable-pip-version-check", "-c", str(pins)]
    packages = ["-e", str(ROOT), *requirements()]
    subprocess.run([python, "-m", "pip", "install", *options, *packages], check=True)
    return python


def requirements() -> list[str]:
    """Return the requirements of pyproject.toml that the smoke set needs, with their bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    dev = [one for one in extras["dev"] if package(one) in TEST_PACKAGES]
    return [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra]), *dev]


def package(requirement: str) -> str:
    return re.split(r"[<>=\[]", requirement)[0]


def versions(python: Path) -> dict[str, str]:
    program = (
        "import json, platform; from importlib.metadata import distributions as d;"
        "v = {one.name: one.version for one in d()};"
        f"print(json.dumps([platform.python_version(), *(v.get(p, {NONE!r}) for p in {PACKAGES})]))"
    )
    found = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return dict(zip(LIBRARIES, json.loads(found.stdout), strict=True))


def run(name: str, python: Path) -> dict[str, Outcomes]:
    """Run the smoke set. Return the numbers of tests of each feature."""
    report = BUILD / f"{name}.xml"
    report.unlink(missing_ok=True)
    files = [file for tests in SMOKE.values() for file in tests]
    subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return counts(report)


def counts(report: Path) -> dict[str, Outcomes]:
    """Return the numbers of tests of each feature in pytest's report."""
    outcomes: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        if (skip := case.find("skipped")) is not None:
            kind = "unavailable" if WITHOUT_TENSORFLOW in skip.attrib["message"] else "skipped"
        else:
            has_failed = case.find("failure") is not None or case.find("error") is not None
            kind = "failed" if has_failed else "passed"
        outcomes[feature_of(case.attrib["classname"]), kind] += 1
    return {
        feature: Outcomes(*(outcomes[feature, kind] for kind in Outcomes._fields))
        for feature in SMOKE
    }


def feature_of(module: str) -> str:
    path = module.replace(".", "/")
    for feature, tests in SMOKE.items():
        if any(path.startswith(test.removesuffix(".py")) for test in tests):
            return feature
    raise ValueError(f"{module} is not in the smoke set")


def column(found: dict[str, str], tests: dict[str, Outcomes]) -> dict[str, str]:
    """Return the column of an environment that ran today, by row.

    Args:
        found: its versions.
        tests: numbers of tests of each feature.
    """
    outcomes = {feature: outcome(numbers) for feature, numbers in tests.items()}
    return {**found, **outcomes, DATE: time.strftime("%Y-%m-%d")}


def columns_of(text: str) -> dict[str, dict[str, str]]:
    """Return the columns of a table that `table` made, by environment and row."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    (_, *names), _, *rows = lines
    return {name: {cells[0]: cells[i] for cells in rows} for i, name in enumerate(names, 1)}


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of a table with one column for each environment."""
    names = [name for name in NAMES if name in columns]
    rows = [
        ["", *names],
        ["---"] * (len(names) + 1),
        *([row, *(columns[name].get(row, NONE) for name in names)] for row in ROWS),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def outcome(numbers: Outcomes) -> str:
    text = f"{numbers.passed} passed"
    if numbers.failed:
        text += f", **{numbers.failed} failed**"
    if numbers.unavailable:
        text += f", {numbers.unavailable} not run (TensorFlow)"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
