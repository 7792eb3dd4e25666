"""Write the planner's figures of the newest benchmark results into docs/planner_internals.md.

`python -m benchmarks --save plan plan_time planner_tables compiled` measures them. Without such
figures in the results, the page remains as it is.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner_internals.md"
TITLE = "## The figures"
BY_HAND = (
    "**By hand, not the path of the product:** rows of step times use models that are written by "
    "hand in `benchmarks/planner_gpt.py` and `benchmarks/planner_llama.py`. These rows are A100 "
    "host, wider models, rank correlation, picked plans, Megatron's table 1 and Llama 3. The row "
    "of memory on B200s uses `benchmarks/planner_memory.py`. `%%dist_plan` reads a step's "
    "jaxpr and uses none of them. They share the cost formulas and constants of `planner/` with "
    "it. No constant is fitted on Megatron's table 1, but one choice of the model's form was made "
    "with it in sight. Rows of all-reduces test the formulas. Rows of traced, planned and compiled "
    "programs test the product."
)
"""Scope of the rows of `planner_tables`: they do not test `%%dist_plan`."""


def main() -> int:
    newest = results.latest()
    content = results.load(newest) if newest else {"date": "", "cases": []}
    chosen = [
        line
        for line in content["cases"]
        if line["benchmark"] in results.PLANNER and "skipped" not in line
    ]
    if chosen:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, after = text.partition(TITLE)
        _, heading, later = after.partition("\n## ")
        section = "\n".join(_section(chosen, content["date"]))
        text = f"{before}{TITLE}\n\n{section}\n{heading}{later}"
        DOCUMENT.write_text(text, encoding="utf-8")
    return 0


def _section(lines: Sequence[dict[str, Any]], date: str) -> Iterator[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "scipy", "numpy"))
    yield (
        f"A run of `make bench` on {date}, Python "
        f"{platform.python_version()}, {packages}. The target is the largest allowed ratio of ours "
        "to the peer. The peer is the floor of operations over peak, 18 bytes a weight, or an "
        "allowed value. It can also be fewer devices, or the memory of the step's inputs alone."
    )
    yield ""
    yield BY_HAND
    yield ""
    yield "| case | ours | peer | unit | ratio | target | |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        met = "" if line["ratio"] <= line["target"] else "**missed**"
        figures = (f"{line[name]:.4g}" for name in ("ours", "peer"))
        case = f"{line['case']}: {line['detail']}" if "detail" in line else line["case"]
        yield (
            f"| {case} | {' | '.join(figures)} | {line['unit']} | {line['ratio']} | "
            f"{line['target']:.4g} | {met} |"
        )


if __name__ == "__main__":
    sys.exit(main())
