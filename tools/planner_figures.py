"""Writes the planner's figures, of the benchmarks that come on standard input, into its document.

`python -m benchmarks plan planner_tables compiled | python -m tools.planner_figures`: lines go on
to standard output, and those of the planner into docs/planner.md.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner.md"
TITLE = "## The figures"
OF_THE_PLANNER = ("plan", "planner_tables", "compiled")


def main() -> int:
    lines = []
    for line in sys.stdin:
        sys.stdout.write(line)
        sys.stdout.flush()
        lines.append(json.loads(line))
    chosen = [line for line in lines if line["benchmark"] in OF_THE_PLANNER]
    if chosen:
        text = DOCUMENT.read_text(encoding="utf-8").partition(TITLE)[0].rstrip()
        section = "\n".join(_section(chosen))
        DOCUMENT.write_text(f"{text}\n\n{TITLE}\n\n{section}\n", encoding="utf-8")
    return 0


def _section(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "scipy", "numpy"))
    yield (
        f"Of a run of `make bench` on {time.strftime('%Y-%m-%d')}, Python "
        f"{platform.python_version()}, {packages}. Ours is to be at most *target* times the peer: "
        "the floor of operations over peak, 18 bytes a weight, what is allowed, fewer devices, or "
        "what a step is given alone."
    )
    yield ""
    yield "| case | ours | peer | unit | ratio | target | |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        met = "" if line["ratio"] <= line["target"] else "**missed**"
        figures = (f"{line[name]:.4g}" for name in ("ours", "peer"))
        yield (
            f"| {line['case']} | {' | '.join(figures)} | {line['unit']} | {line['ratio']} | "
            f"{line['target']:.4g} | {met} |"
        )


if __name__ == "__main__":
    sys.exit(main())
