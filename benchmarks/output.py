"""Bytes sent to the front end for 4 x 4000 lines, against `%%px` in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import both
from benchmarks.case import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale

LINES = 4000
CELLS = {
    "the same on all ranks": "for i in range(LINES):\n    print(f'step {i:05d} of many')",
    "different on every rank": (
        "import os\nfor i in range(LINES):\n    print(f'step {i:05d} in {os.getpid()}')"
    ),
    "different on every rank, one each ms": (
        "import os, time\nfor i in range(LINES):\n"
        "    print(f'step {i:05d} in {os.getpid()}', flush=True)\n    time.sleep(0.001)"
    ),
}
LIMIT_BYTES = 2_000_000


def cases(scale: Scale) -> Iterator[Case]:
    engines, lines = scale.of((4, LINES), (2, 10))
    with both.kernel(scale, engines) as kernel:
        for name, cell in CELLS.items():
            code = cell.replace("LINES", str(lines))
            ours = kernel.run(f"%%dist_run\n{code}").check().sent_bytes
            peer = kernel.run(f"%%px\n{code}").check().sent_bytes
            yield Case(
                f"output of {engines} x {lines} lines, {name}, against %%px",
                ours,
                peer,
                unit="bytes",
                target=LIMIT_BYTES / peer,
                runs=1,
            )
