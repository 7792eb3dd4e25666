"""Runs for tests without a cluster, and a process that writes a run."""

from __future__ import annotations

import contextlib
import re
import resource
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from nbdist.records import Columns, Metrics, RecoveryRecord, Rows, RunState, RunWorker
from nbdist.telemetry.run_reader import find, stored_runs
from nbdist.telemetry.run_writer import RunDirectory, new_id
from nbdist.utils.processes import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np

    import nbdist
    from nbdist.execution.live_run import LiveRun
    from nbdist.records import AnyEvent
    from nbdist.telemetry.run_reader import StoredRun

LOSS = Columns(own=("loss",))


def plain(text: str) -> str:
    """Return a text without colours. IPython 8 and 9 colour parts of words."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def latest(cluster: nbdist.Cluster) -> StoredRun:
    """Return the run that the cluster started last."""
    return stored_runs(cluster.settings.runs_path)[0]


def ids(cluster: nbdist.Cluster) -> set[str]:
    """Return the ids of all kept runs."""
    return {run.id for run in stored_runs(cluster.settings.runs_path)}


def send(run: LiveRun, record: AnyEvent) -> None:
    """Pass a record to all subscribers, as the receiver does."""
    for subscriber in run.subscribers:
        subscriber(record)


def new_state(**changes: object) -> RunState:
    """Return the state of a step cell on two ranks that starts now, written by this process."""
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
    """Return one message with these rows."""
    flat = [value for row in values for value in row]
    return Rows(rank=rank, cell=1, columns=columns, values=struct.pack(f"<{len(flat)}d", *flat))


def losses(first: int, last: int, rank: int = 0, lost_s: float = 0.0) -> Rows:
    """Return the rows of steps `first` to `last`, each 0.1 s long. The loss of step 4 on rank 1 is
    4.1.

    `lost_s` is the time in seconds that the run has lost before.
    """
    steps = range(first, last + 1)
    return rows([[rank, 1, s, lost_s + s / 10, s + rank / 10] for s in steps], rank=rank)


def recover(died: int, step: int, time_s: float, lost_s: float = 1.4) -> RecoveryRecord:
    """Return a recovery of rank 1 after step `died`. The run continued after `step`."""
    reason = f"rank 1 died after step {died}"
    return RecoveryRecord(time_s=time_s, ranks=(1,), reason=reason, step=step, lost_s=lost_s)


def loss(step: int, rank: int = 0) -> Metrics:
    return Metrics(
        rank=rank, cell=1, epoch=1, step=step, time_s=step / 10, own={"loss": step + rank / 10}
    )


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Limit the file size, as on a full disk. Writes beyond it fail, the last one in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def reports(run: StoredRun) -> list[np.ndarray]:
    """Return the arrays of the run's tables, without samples of the hosts."""
    return [run.array(table) for table in run.tables() if not table.columns.system]


def read(run: RunDirectory) -> StoredRun:
    """Return the run as a reader finds it."""
    return find(run.path.parent, run.state.id)


def writing_process(program: str, root: Path) -> subprocess.Popen[str]:
    """Start a process that runs the program. `root` is the folder of runs."""
    begin = "from pathlib import Path\nfrom tests.runs import *\n"
    code = f"{begin}root = Path({str(root)!r})\n{program}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
