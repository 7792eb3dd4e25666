"""Runs for tests that need no cluster, and a process that writes one."""

from __future__ import annotations

import contextlib
import resource
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from nbdist.records import Columns, Metrics, Rows, RunState, RunWorker
from nbdist.telemetry.kept import find
from nbdist.telemetry.processes import this_process
from nbdist.telemetry.rundir import RunDirectory, new_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from nbdist.telemetry.kept import KeptRun

LOSS = Columns(own=("loss",))


def new_state(**changes: object) -> RunState:
    """A step cell on two ranks that begins now, written by this process."""
    fields: dict[str, object] = {
        "id": new_id(time.time()),
        "number": 1,
        "label": 3,
        "header": "%%dist_run --data train",
        "strategy": "mirrored",
        "framework": "TensorFlow 2.21",
        "status": "running",
        "began": time.time(),
        "workers": tuple(RunWorker(rank=r, host="here", pid=1, devices="1 x cpu") for r in (0, 1)),
        "versions": {"tensorflow": "2.21"},
        "writer": this_process(),
        "replicas": 2,
    }
    return RunState(**(fields | changes))  # type: ignore[arg-type]


def new_run(root: Path, **changes: object) -> RunDirectory:
    return RunDirectory.create(root, new_state(**changes), "# %% [3] %%dist_run --data train\n")


def rows(values: Sequence[Sequence[float]], columns: Columns = LOSS, rank: int = 0) -> Rows:
    """One message with these rows."""
    flat = [value for row in values for value in row]
    return Rows(rank=rank, cell=1, columns=columns, values=struct.pack(f"<{len(flat)}d", *flat))


def losses(first: int, last: int, rank: int = 0) -> Rows:
    """Steps `first` to `last`: the loss of step 4 on rank 1 is 4.1."""
    return rows([[rank, 1, s, s / 10, s + rank / 10] for s in range(first, last + 1)], rank=rank)


def loss(step: int, rank: int = 0) -> Metrics:
    return Metrics(
        rank=rank, cell=1, epoch=1, step=step, time_s=step / 10, own={"loss": step + rank / 10}
    )


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """As on a full disk, writes beyond it fail, the last one in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def reports(run: KeptRun) -> list[np.ndarray]:
    """The arrays of its tables."""
    return [run.array(table) for table in run.tables()]


def read(run: RunDirectory) -> KeptRun:
    """The run as whoever looks at it finds it."""
    return find(run.path.parent, run.state.id)


def writing_process(program: str, root: Path) -> subprocess.Popen[str]:
    """A process that runs the program, in which `root` is the folder of runs."""
    begin = "from pathlib import Path\nfrom tests.runs import *\n"
    code = f"{begin}root = Path({str(root)!r})\n{program}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
