"""Run `python -m benchmarks NAME...`: prints one JSON object per case to standard output."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = (
    "imports",
    "cell",
    "output",
    "start",
    "step",
    "scaling",
    "telemetry",
    "overhead",
    "chart",
    "reload",
    "placement",
    "place",
    "recovery",
    "plan",
    "planner_tables",
    "compiled",
    "autoplace",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"])
    args = parser.parse_args()
    chosen = NAMES if "all" in args.names else args.names
    missed = 0
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        for case in importlib.import_module(f"benchmarks.{name}").cases():
            print(json.dumps(case.line(name)), flush=True)
            missed += not case.met()
    if missed:
        print(f"{missed} of the targets above were missed in this run", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
