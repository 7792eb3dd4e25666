"""Cluster without workers and runs without training, for the kernel of a notebook."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from ipykernel.connect import get_connection_file
from IPython.display import display
from jupyter_core.paths import jupyter_runtime_dir

from nbdist.records import (
    RUN_MIME,
    ClusterState,
    Columns,
    Device,
    Rows,
    RunOutput,
    RunWorker,
    WorkerState,
)
from nbdist.settings import Settings
from nbdist.telemetry.frontend_request import this_request
from nbdist.utils.files import replace_file
from nbdist.utils.processes import this_process
from tests.runs import new_run

if TYPE_CHECKING:
    from nbdist.telemetry.run_writer import RunDirectory

RANKS = 4
STEP_S = 0.05
MEASURED = ("step_s", "input_s", "collective_s", "process_bytes", "device_bytes")
COLUMNS = Columns(measures=MEASURED, own=("loss",))


def cluster(run: str = "") -> None:
    """Write the file of a cluster in this kernel, with the id of its active run."""
    device = Device(platform="gpu", kind="NVIDIA H100", name="GPU:0")
    workers = tuple(
        WorkerState(rank=rank, host=f"host{rank}", pid=rank, versions={}, devices=(device, device))
        for rank in range(RANKS)
    )
    state = ClusterState(
        id="synthetic",
        frameworks=("tensorflow",),
        workers=workers,
        run=run,
        writer=this_process(),
        kernel=Path(get_connection_file()).stem.removeprefix("kernel-"),
    )
    folder = Path(jupyter_runtime_dir()) / "nbdist" / state.id
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "cluster.json", msgspec.json.encode(state))


def run(seconds: float) -> RunDirectory:
    """Report steps of all ranks until the time is over or a stop is requested."""
    workers = tuple(
        RunWorker(rank=rank, host=f"host{rank}", pid=rank, devices="2 x gpu")
        for rank in range(RANKS)
    )
    request = this_request()
    kept = new_run(
        Settings.from_environment().runs_path,
        workers=workers,
        replicas=2 * RANKS,
        batch=256,
        stoppable=True,
        request=request.id,
        cell=request.cell,
    )
    cluster(kept.state.id)
    output = RunOutput(id=kept.state.id, text="under way")
    display({RUN_MIME: msgspec.to_builtins(output), "text/plain": "under way"}, raw=True)
    step, end = 0, time.monotonic() + seconds
    while time.monotonic() < end and not kept.stops_requested():
        _report(kept, step)
        step += 1
        time.sleep(STEP_S)
    status = "stopped" if kept.stops_requested() else "finished"
    kept.update(status=status, ended=time.time())
    kept.close()
    cluster()
    return kept


def _report(kept: RunDirectory, step: int) -> None:
    for rank in range(RANKS):
        loss = 2.0 / (1 + 0.01 * step) + 0.01 * rank
        row = np.array([rank, 0, step, step * STEP_S, STEP_S, 0.002, 0.005, 4e8, 2e9, loss])
        kept.take(Rows(rank=rank, cell=1, columns=COLUMNS, values=row.tobytes()))
    kept.flush()
