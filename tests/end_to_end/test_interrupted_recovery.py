"""Interrupted recoveries: the next owner of the cluster starts them again."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.records import Saving, StepOptions
from nbdist.telemetry.run_reader import stored_runs
from nbdist.utils.polling import repeat_until
from tests.exact import STEP, losses, setup
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nbdist.records import RunState

RANKS, STEPS = 2, 400
SETUP = f"""
import pathlib, time
{setup(4)}
here = pathlib.Path({{folder!r}})
if (here / "hold").exists():  # a recovery reruns this cell
    (here / f"held-{{{{rank}}}}").touch()
    while (here / "hold").exists():
        time.sleep(0.02)
"""
LOSSES = losses(STEPS)

BOUND_S = 60.0

pytestmark = pytest.mark.usefixtures("own_folders")


def wait_for_run(folder: Path, condition: Callable[[RunState, int], bool]) -> RunState:
    """Return the state of the newest run once `condition(state, steps)` is true."""
    found: list[RunState] = []

    def check() -> bool:
        for run in stored_runs(folder / "runs")[:1]:
            found[:] = [run.state()]
            return condition(found[0], max((run.count(table) for table in run.tables()), default=0))
        return False

    assert repeat_until(check, BOUND_S), f"the run is {found}"
    return found[0]


def is_held(folder: Path) -> bool:
    """Return True if the rerun set-up blocks on all ranks."""
    return len(list(folder.glob("held-*"))) == RANKS


def kill_a_rank_and_hold(folder: Path) -> RunState:
    """Kill rank 1 and hold its recovery until the file `hold` is removed."""
    state = wait_for_run(folder, lambda _, steps: steps > 60)
    (folder / "hold").touch()
    os.kill(state.workers[1].pid, signal.SIGKILL)
    assert repeat_until(lambda: is_held(folder), BOUND_S)
    return wait_for_run(folder, lambda state, _: bool(state.recovering))


def start_run(kernel: Kernel, folder: Path) -> None:
    """Start a run with checkpoints in the kernel."""
    kernel.run("%load_ext nbdist\n%dist_start 2 --framework jax").check()
    kernel.run(f"%%dist_run\n{SETUP.format(folder=str(folder))}").check()
    saved = f"--checkpoint {folder / 'saved'} --save-every 20 --batch 4 --steps {STEPS}"
    kernel.send(f"%%dist_run --data xs {saved}\n{STEP}")


def check_final_losses() -> None:
    with nbdist.attach() as cluster:
        run = cluster.follow()
        np.testing.assert_array_equal(run.loss, LOSSES)
        (recover,) = run.recoveries
        assert 1 in recover.ranks  # also rank 0 if it did not respond in time
        assert cluster.run("float(w.sum())").results == {0: str(LOSSES[-1]), 1: str(LOSSES[-1])}


def owner_pid(state: RunState) -> int:
    return state.writer.pid


def test_run_survives_a_kernel_kill_during_a_recovery(tmp_path: Path) -> None:
    with Kernel() as kernel:
        start_run(kernel, tmp_path)
        state = kill_a_rank_and_hold(tmp_path)
        os.kill(owner_pid(state), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    wait_for_run(tmp_path, lambda now, _: owner_pid(now) != owner_pid(state))
    check_final_losses()


@pytest.mark.full  # a detached runner recovers as a kernel does
def test_run_survives_a_runner_kill_during_a_recovery(tmp_path: Path) -> None:
    with Kernel() as kernel:
        start_run(kernel, tmp_path)
        first = wait_for_run(tmp_path, lambda _, steps: steps > 20)
        os.kill(owner_pid(first), signal.SIGKILL)
    wait_for_run(tmp_path, lambda now, _: owner_pid(now) != owner_pid(first))
    state = kill_a_rank_and_hold(tmp_path)
    os.kill(owner_pid(state), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    wait_for_run(tmp_path, lambda now, _: owner_pid(now) != owner_pid(state))
    check_final_losses()


@pytest.mark.full  # an earlier phase of the recovery
def test_run_survives_a_kernel_kill_without_forks(tmp_path: Path) -> None:
    with Kernel() as kernel:
        start_run(kernel, tmp_path)
        state = wait_for_run(tmp_path, lambda _, steps: steps > 60)
        fork_server = psutil.Process(state.workers[0].pid).parent()
        assert fork_server is not None
        os.kill(state.workers[1].pid, signal.SIGKILL)
        wait_for_run(tmp_path, lambda now, _: bool(now.recovering))
        fork_server.suspend()
        os.kill(owner_pid(state), signal.SIGKILL)
        fork_server.resume()
    wait_for_run(tmp_path, lambda now, _: owner_pid(now) != owner_pid(state))
    check_final_losses()


@pytest.mark.full  # test_reattach.py restarts a kernel between steps
def test_run_survives_a_kernel_restart_during_a_recovery(tmp_path: Path) -> None:
    with Kernel() as kernel:
        start_run(kernel, tmp_path)
        state = kill_a_rank_and_hold(tmp_path)
        kernel.manager.restart_kernel()
        (tmp_path / "hold").unlink()
        wait_for_run(tmp_path, lambda now, _: owner_pid(now) != owner_pid(state))
        kernel.client.wait_for_ready(timeout=60)
        check_final_losses()


@pytest.mark.full
def test_interrupt_during_a_recovery_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interrupt ends the run; until a restart or a run with `--resume`, no cell runs."""
    saving = Saving(folder=str(tmp_path / "saved"), every_steps=20)
    step = StepOptions(data="xs", batch=4, steps=STEPS)
    pids = []

    def interrupt() -> None:
        pids.append(kill_a_rank_and_hold(tmp_path).writer.pid)
        os.kill(os.getpid(), signal.SIGINT)

    with nbdist.Cluster(hosts=RANKS, framework="jax") as cluster:
        cluster.run(SETUP.format(folder=str(tmp_path)))
        user = threading.Thread(target=interrupt)
        user.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                cluster.run(STEP, step=step, saving=saving)
        finally:
            (tmp_path / "hold").unlink(missing_ok=True)
            user.join()
        assert pids == [os.getpid()]
        assert wait_for_run(tmp_path, lambda state, _: state.is_over).status == "interrupted"
        assert "interrupted during the replacement of workers: type" in capsys.readouterr().err
        with pytest.raises(nbdist.WorkerError, match="some workers are missing: run %dist_restart"):
            cluster.run("1")
        with pytest.raises(nbdist.WorkerError, match="some workers are missing: run %dist_restart"):
            cluster.push({"a": 1})
        resuming = Saving(folder=saving.folder, every_steps=20, resume=True)
        run = cluster.run(STEP, step=step, saving=resuming)
        assert run.loss[-1] == LOSSES[-1]
        assert cluster.run("float(w.sum())").results[0] == str(LOSSES[-1])
