"""In a notebook's kernel: a cluster without workers, and runs of it that train nothing."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
from ipykernel.connect import get_connection_file
from IPython.display import display
from jupyter_core.paths import jupyter_runtime_dir

from nbdist.records import (
    MEASURES,
    RUN_MIME,
    ClusterState,
    Columns,
    Device,
    Rows,
    RunOutput,
    RunState,
    RunWorker,
    WorkerState,
)
from nbdist.settings import Settings
from nbdist.telemetry.files import replace_file
from nbdist.telemetry.processes import this_process
from nbdist.telemetry.rundir import RunDirectory, new_id

RANKS = 4
STEP_S = 0.05
COLUMNS = Columns(measures=MEASURES, own=("loss",))
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)


def cluster(run: str = "") -> None:
    """Say that this kernel has a cluster, and which run is under way on it."""
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
    """Report from all ranks until the time is over, or somebody has asked to stop."""
    began = time.time()
    kept = RunDirectory.create(Settings.from_environment().runs_path, _state(began), "pass\n")
    cluster(kept.state.id)
    output = RunOutput(id=kept.state.id, text="under way")
    bundle = {RUN_MIME: msgspec.to_builtins(output), "text/plain": "under way"}
    shown = display(bundle, raw=True, display_id=True)
    step = 0
    while time.time() < began + seconds and not kept.stop_requested():
        _report(kept, step)
        shown.update({**bundle, "text/plain": f"step {step}"}, raw=True)
        step += 1
        time.sleep(STEP_S)
    status = "stopped" if kept.stop_requested() else "finished"
    kept.update(status=status, ended=time.time())
    kept.close()
    cluster()
    output = RunOutput(id=kept.state.id, text=status, over=True)
    bundle = {RUN_MIME: msgspec.to_builtins(output), "image/png": PIXEL}
    shown.update({**bundle, "text/plain": f"the run was {status}"}, raw=True)
    return kept


def _state(began: float) -> RunState:
    return RunState(
        id=new_id(began),
        number=1,
        label=1,
        header="%%dist_run --data train --batch 256",
        strategy="mirrored",
        framework="TensorFlow 2.21.0",
        status="running",
        began=began,
        workers=tuple(
            RunWorker(rank=rank, host=f"host{rank}", pid=rank, devices="2 x gpu")
            for rank in range(RANKS)
        ),
        versions={},
        writer=this_process(),
        replicas=2 * RANKS,
        batch=256,
        stoppable=True,
    )


def _report(kept: RunDirectory, step: int) -> None:
    for rank in range(RANKS):
        loss = 2.0 / (1 + 0.01 * step) + 0.01 * rank
        row = np.array([rank, 0, step, step * STEP_S, STEP_S, 0.002, 0.005, 4e8, 2e9, loss])
        kept.take(Rows(rank=rank, cell=1, columns=COLUMNS, values=row.tobytes()))
    kept.flush()
