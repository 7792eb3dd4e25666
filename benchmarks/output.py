"""Bytes sent to the front end for 4 x 4000 lines, against `%%px` in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import both
from benchmarks.case import Case
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = 4000
CELLS = {
    "the same on all ranks": f"for i in range({LINES}):\n    print(f'step {{i:05d}} of many')",
    "different on every rank": (
        f"import os\nfor i in range({LINES}):\n    print(f'step {{i:05d}} in {{os.getpid()}}')"
    ),
    "different on every rank, one each ms": (
        f"import os, time\nfor i in range({LINES}):\n"
        "    print(f'step {i:05d} in {os.getpid()}', flush=True)\n    time.sleep(0.001)"
    ),
}
LIMIT_BYTES = 2_000_000


def cases() -> Iterator[Case]:
    with Kernel() as kernel:
        kernel.run(both.START).check()
        for name, cell in CELLS.items():
            ours = kernel.run(f"%%dist_run\n{cell}").check().sent_bytes
            peer = kernel.run(f"%%px\n{cell}").check().sent_bytes
            yield Case(
                f"4 x {LINES} lines, {name}",
                ours,
                peer,
                unit="bytes",
                target=LIMIT_BYTES / peer,
                runs=1,
            )
        kernel.run(both.STOP).check()
