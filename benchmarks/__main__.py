"""Run `python -m benchmarks NAME...`: prints one JSON object per case to standard output.

With `--smoke`, each case runs once at a tiny size, to show that it works. With `--save`, the cases
are stored in benchmarks/results, and their table and a comparison with the last results follow.
The exit status is 1 if a case failed. Missed targets do not change it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any

from benchmarks import both, ours, results
from benchmarks.case import STRATEGIES, Scale
from benchmarks.limits import limited

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.case import Case, Skipped

NAMES = (
    "imports",
    "cell",
    "output",
    "start",
    "step",
    "scaling",
    "input",
    "telemetry",
    "overhead",
    "loop",
    "watch",
    "chart",
    "reload",
    "runs_tab",
    "placement",
    "place",
    "recovery",
    "transfer",
    "plan",
    "plan_time",
    "planner_tables",
    "compiled",
    "autoplace",
)
WITH_CLUSTERS = ("step", "scaling", "input", "overhead", "loop", "watch", "placement", "recovery")
"""Benchmarks that share clusters in a smoke run."""

LIMIT_S, SMOKE_LIMIT_S = 1800.0, 180.0
"""Time limit of a case."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"])
    parser.add_argument("--strategy", choices=STRATEGIES, help="measure only this strategy")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--smoke", action="store_true", help="run each case at a tiny size")
    kinds.add_argument("--save", action="store_true", help="store and compare the results")
    args = parser.parse_args()
    # A shell ignores SIGINT in background jobs and in all their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = NAMES if "all" in args.names else tuple(args.names)
    if args.smoke and "all" in args.names:
        return _run_lanes(("--strategy", args.strategy) if args.strategy else ())
    scale = Scale(args.smoke, (args.strategy,) if args.strategy else STRATEGIES)
    with _own_folders():
        lines, failed = _run(names, scale)
    if args.save:
        _save(lines)
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return int(bool(failed))


def _run_lanes(options: Sequence[str]) -> int:
    """Run all benchmarks at a tiny size, in two processes. Return 1 if a case failed."""
    lanes = WITH_CLUSTERS, tuple(name for name in NAMES if name not in WITH_CLUSTERS)
    command = (sys.executable, "-m", "benchmarks", "--smoke", *options)
    with contextlib.ExitStack() as undo:
        processes = [undo.enter_context(subprocess.Popen([*command, *lane])) for lane in lanes]
        try:
            statuses = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()
    return int(any(statuses))


def _run(names: Sequence[str], scale: Scale) -> tuple[list[dict[str, Any]], list[str]]:
    """Run benchmarks and print their lines; return these, and the names of those that failed."""
    lines, failed, missed = [], [], 0
    output = sys.stdout  # cells that are under way may redirect it
    for name in names:
        began = time.perf_counter()
        try:
            for case in _cases(name, scale):
                line = case.line(name)
                output.write(f"{json.dumps(line)}\n")
                output.flush()
                lines.append(line)
                missed += not case.met()
        except Exception:  # noqa: BLE001 - the other benchmarks still run
            traceback.print_exc()
            failed.append(name)
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.0f} s\n")
    if missed and not scale.smoke:
        sys.stderr.write(f"{missed} of the targets above were missed in this run\n")
    return lines, failed


def _cases(name: str, scale: Scale) -> Iterator[Case | Skipped]:
    """Yield the cases of a benchmark. Each one has a time limit."""
    cases = iter(importlib.import_module(f"benchmarks.{name}").cases(scale))
    number = 0
    while True:
        number += 1
        with limited(SMOKE_LIMIT_S if scale.smoke else LIMIT_S, f"case {number} of {name}"):
            case = next(cases, None)
        if case is None:
            return
        yield case


@contextlib.contextmanager
def _own_folders() -> Iterator[None]:
    """Store runs in a temporary folder. Stop shared clusters at the end."""
    with tempfile.TemporaryDirectory(prefix="nbdist-benchmarks-") as folder:
        os.environ["NBDIST_RUNS_FOLDER"] = f"{folder}/runs"
        try:
            yield
        finally:
            ours.stop_shared()
            both.stop_shared()


def _save(lines: Sequence[dict[str, Any]]) -> None:
    """Store the lines, and print their table and the comparison with the last results."""
    path = results.save(lines)
    outcome = [line for line in lines if line["benchmark"] not in results.PLANNER]
    texts = [f"Results: {path.name}", "", *results.table(outcome)]
    if previous := results.latest(before=path.stem):
        old = results.load(previous)
        texts += ["", f"Compared with {previous.name} ({old['machine']}, {old['versions']}):", ""]
        texts += results.comparison(old["cases"], lines)
    print("\n".join(texts))


if __name__ == "__main__":
    sys.exit(main())
