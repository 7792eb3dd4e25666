"""Copy benchmark lines from standard input to standard output, and the planner's into its page.

`python -m benchmarks plan planner_tables compiled | python -m tools.planner_figures` writes the
planner's figures into docs/planner_internals.md.
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

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner_internals.md"
TITLE = "## The figures"
OF_THE_PLANNER = ("plan", "planner_tables", "compiled")
BY_HAND = (
    "**By hand, not the path of the product:** rows of step times (A100 host, wider models, rank "
    "correlation, picked plans, Megatron's table 1, Llama 3) use models that are written by hand "
    "in `benchmarks/planner_gpt.py` and `benchmarks/planner_llama.py`. The row of memory on B200s "
    "uses `benchmarks/planner_memory.py`. `%%dist_plan` reads a step's jaxpr and uses none of "
    "them. They share the cost formulas and constants of `planner/` with it. Rows of all-reduces "
    "test these formulas. Rows of traced, planned and compiled programs test the product."
)
"""Scope of the rows of `planner_tables`: they do not test `%%dist_plan`."""


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
        f"A run of `make bench` on {time.strftime('%Y-%m-%d')}, Python "
        f"{platform.python_version()}, {packages}. The target is the largest allowed ratio of ours "
        "to the peer. The peer is the floor of operations over peak, 18 bytes a weight, an allowed "
        "value, fewer devices, or the memory of the step's inputs alone."
    )
    yield ""
    yield BY_HAND
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
