"""Run every fault test on real workers and write the results into docs/fault_matrix.md.

Run `python -m tools.fault_matrix [PYTEST ARGUMENT...]`. All tests take 45 minutes. Arguments select
some of them (`-k 'not random'`). The table contains this run only.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "fault_matrix.md"
REPORT = ROOT / "build" / "faults.xml"
FAULTS = ("recovery", "saved_fits", "shrink", "checkpoint_faults", "owner_faults")
FAULTS += ("interrupted_recovery", "random_faults")
TESTS = tuple(f"tests/end_to_end/test_{name}.py" for name in FAULTS)
TITLE = "## The tests"


def main() -> int:
    REPORT.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "--full", "-v", f"--junitxml={REPORT}", *TESTS]
    done = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, check=False)
    text = DOCUMENT.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
    DOCUMENT.write_text(f"{text}\n\n{TITLE}\n\n{_section()}\n", encoding="utf-8")
    return done.returncode


def _section() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "jax"))
    head = (
        f"Every row is a test that ran on {time.strftime('%Y-%m-%d')} with Python "
        f"{platform.python_version()}, {packages}, two or three workers on one machine "
        "(`make chaos`). A test passes if the outcome is the one in its name. A recovery takes "
        "half a minute at most."
    )
    rows = ["| test | where | result | seconds |", "|---|---|---|---|", *_rows()]
    return f"{head}\n\n" + "\n".join(rows)


def _rows() -> Iterator[str]:
    for case in ElementTree.parse(REPORT).iter("testcase"):  # noqa: S314 - pytest wrote it
        if "name" not in case.attrib:  # it was running when the run was ended
            continue
        name, _, where = case.attrib["name"].partition("[")
        words = name.removeprefix("test_").replace("_", " ")
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        result = "**failed**" if failed else "skipped" if skipped else "passed"
        seconds = float(case.attrib["time"])
        yield f"| {words} | {_place(where.rstrip(']'))} | {result} | {seconds:.1f} |"


def _place(words: str) -> str:
    """`2-12-pjrt step` is rank 2, step 12, in a pjrt step."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+)-)?(.*)", words)
    assert found is not None
    rank, step, rest = found.groups()
    parts = [rest] + ([f"rank {rank}"] if rank else []) + ([f"step {step}"] if step else [])
    return ", ".join(filter(None, parts))


if __name__ == "__main__":
    sys.exit(main())
