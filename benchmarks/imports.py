"""`import nbdist` after IPython, against the import of IPython."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.case import compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Case, Scale

RUNS = 9


def cases(scale: Scale) -> Iterator[Case]:
    yield compare(
        "import of nbdist after IPython, against the import of IPython",
        lambda: _seconds("import IPython", "import nbdist"),
        lambda: _seconds("", "import IPython"),
        unit="s",
        target=0.5,
        runs=scale.runs(RUNS),
    )


def _seconds(before: str, measured: str) -> float:
    program = (
        f"{before}\nimport time; start = time.perf_counter()\n{measured}\n"
        "print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)
