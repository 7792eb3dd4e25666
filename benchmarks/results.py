"""Results of the benchmarks: one file for each day, the table of a run, and its comparison."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Line = dict[str, Any]
"""A case as `Case.line` or `Skipped.line` returns it."""

FOLDER = Path(__file__).parent / "results"
PLANNER = ("plan", "plan_time", "planner_tables", "compiled")
"""Benchmarks whose figures are in docs/planner_internals.md."""

WORSE = 1.05
"""Growth of a ratio from which on a case counts as worse."""

_PACKAGES = ("nbdist", "tensorflow", "jax", "ipyparallel")
_CPUINFO = Path("/proc/cpuinfo")
_GIT_S = 10


def versions() -> dict[str, str]:
    """Return the versions of the packages and of Python, and the commit."""
    found = {"python": platform.python_version(), "commit": _commit()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    """Return the commit of this checkout, with `+` if files differ from it."""
    commit, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain")
    return f"{commit or 'unknown'}{'+' if changes else ''}"


def _git(*command: str) -> str:
    """Return the output of git; empty if it is not installed or fails."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(
        [git, *command],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=_GIT_S,
    )
    return done.stdout.strip()


def machine() -> dict[str, object]:
    """Return the number of cores that this process may use, the CPU model, and the memory."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next(models, platform.machine()),
        "memory_bytes": psutil.virtual_memory().total,
    }


def save(lines: Sequence[Line], folder: Path = FOLDER, date: str = "") -> Path:
    """Write the file of the day, and return its path.

    A second run on the same day replaces the cases that it has measured.
    """
    date = date or time.strftime("%Y-%m-%d")
    path = folder / f"{date}.json"
    measured = {_key(line) for line in lines}
    previous = load(path)["cases"] if path.exists() else []
    kept = [line for line in previous if _key(line) not in measured]
    content = {
        "date": date,
        "versions": versions(),
        "machine": machine(),
        "cases": [*kept, *lines],
    }
    folder.mkdir(exist_ok=True)
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
    return path


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def latest(folder: Path = FOLDER, before: str = "") -> Path | None:
    """Return the newest file, or the newest before a date. None without a file."""
    paths = sorted(path for path in folder.glob("*.json") if not before or path.stem < before)
    return paths[-1] if paths else None


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of a Markdown table of all cases."""
    yield "| | nbdist | compared with | ratio | target | |"
    yield "|---|---|---|---|---|---|"
    for line in lines:
        if "skipped" in line:
            yield f"| {line['case']} | | | | | not run: {line['skipped']} |"
            continue
        ours, peer = (_figure(line[side], line["unit"]) for side in ("ours", "peer"))
        met = "" if line["ratio"] <= line["target"] else "**missed**"
        ratios = f"{line['ratio']} | {line['target']:.4g}"
        yield f"| {line['case']} | {ours} | {peer} | {ratios} | {met} |"


def comparison(old: Sequence[Line], new: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of a Markdown table: the ratio of each case in both runs.

    Cases that one of the runs did not measure are left out.
    """
    previous = {_key(line): _ratio(line) for line in old if "skipped" not in line}
    yield "| | before | now | |"
    yield "|---|---|---|---|"
    for line in new:
        if "skipped" in line or _key(line) not in previous:
            continue
        before, now = previous[_key(line)], _ratio(line)
        worse = "**worse**" if now > WORSE * before else ""
        yield f"| {line['case']} | {before:.3f} | {now:.3f} | {worse} |"


def _key(line: Line) -> tuple[str, str]:
    return line["benchmark"], line["case"]


def _ratio(line: Line) -> float:
    """Return the ratio with more digits than the line contains."""
    return float(line["ours"]) / float(line["peer"])


def _figure(value: float, unit: str) -> str:
    """Return a value with three digits, in the fitting multiple of its unit."""
    scales = {
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
        "ms": ((1e3, "s"), (1.0, "ms"), (1e-3, "µs")),
        "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    }.get(unit, ((1.0, unit),))
    size, name = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    number = value / size
    text = f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
    return f"{text} {name}".strip()
