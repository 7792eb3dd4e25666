"""Runs of exported programs: a process beside rank 0 stores them, and a notebook follows them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.execution import program_runs
from nbdist.execution.following import follow
from nbdist.settings import Settings
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.execution.saved_runs import SavedRun

LIMIT_S = 120
POLL_S = 0.1

JAX = """
import os, signal, sys, threading
import nbdist
job = nbdist.script("pjrt", seed=3)
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
train = x, x.sum(1, keepdims=True)
w = jnp.zeros((4, 1))

def step(batch):
    global w
    x, y = batch
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    w = w - 0.1 * g
    return loss

history = job.train(step, data="train", batch=16, epochs=3)
np.save(f"loss{job.rank}.npy", history["loss"])
"""
TENSORFLOW = """
import nbdist
job = nbdist.script("mirrored", seed=3)
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
with job.strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
with job.cell():
    history = model.fit(x, y, epochs=3, batch_size=16, verbose=0)
np.save(f"loss{job.rank}.npy", history.history["loss"])
"""
CLOSE = "job.close()\n"
RAISE = """
with job.cell():
    job.report(loss=2.0)
    if job.rank == 1:
        raise ValueError("no such day")
    threading.Event().wait()
"""
KILL = """
with job.cell():
    job.report(step=2, loss=2.0)
    while job.rank or not os.path.exists("go"):
        threading.Event().wait(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAIT = """
with job.cell():
    for i in range(3):
        job.report(step=i, loss=float(i))
    while not os.path.exists("go"):
        threading.Event().wait(0.05)
"""

WRITE = """
import logging, warnings
warnings.simplefilter("ignore")  # JAX warns about forks
log = logging.StreamHandler()
with job.cell():
    job.report(loss=2.0)
    print("größer", job.rank)
    sys.stdout.writelines(["a", "b\\n"])
    log.emit(logging.makeLogRecord({"msg": "careful"}))
    if job.rank == 0 and os.fork() == 0:
        print("from a fork", flush=True)
        os._exit(0)
print("between cells")
"""
FLOOD = """
import psutil
with job.cell():
    job.report(loss=2.0)
    (store,) = [p for p in psutil.Process().children() if "program_runs" in str(p.cmdline())]
    store.kill()
    store.wait()
    for _ in range(40):
        sys.stderr.write("x" * 1_000_000 + "\\n")
    job.report(loss=3.0)
print("after the flood")
"""
"""Program whose store ends: 40 MB of text are more than its rank keeps."""


def started(folder: Path, source: str, hosts: int = 2, **env: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(source)
    command = [sys.executable, "-m", "nbdist.cli", "run", "train.py", "--hosts", str(hosts)]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NBDIST_RUNS_FOLDER": str(folder / "runs"), **env},
    )


def result(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=LIMIT_S)
    return out


def ended(run: SavedRun) -> SavedRun:
    """Wait until the process beside rank 0 has stored the end of a run."""
    assert repeat_until(lambda: run.state.is_over, LIMIT_S, POLL_S)
    return run


def newest_line(folder: Path) -> str:
    """Return the line of the newest run. It is empty if no run is stored."""
    with contextlib.suppress(OSError, IndexError):
        return repr(nbdist.runs(folder / "runs")[0])
    return ""


def storing() -> Iterator[psutil.Process]:
    """Yield the processes that store runs of programs."""
    for process in psutil.process_iter(["cmdline"]):
        if program_runs.__name__ in (process.info["cmdline"] or ()):
            yield process


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_program_stores_its_run_with_the_rows_of_all_ranks(tmp_path: Path, hosts: int) -> None:
    process = started(tmp_path, JAX + CLOSE, hosts)
    out = result(process)
    assert process.returncode == 0, out
    (run,) = nbdist.runs(tmp_path / "runs")
    state = run.state
    assert (state.status, state.kind, len(state.workers)) == ("finished", "step", hosts)
    assert [worker.status for worker in state.workers] == ["finished"] * hosts
    assert re.fullmatch(r"train\.py, step, \d\d:\d\d", state.name)
    assert state.versions.keys() >= {"python", "jax"}
    assert not state.stoppable
    assert state.header == "history = job.train(step, data='train', batch=16, epochs=3)"
    assert f"nbdist: the run is in {tmp_path}/runs/{run.id}\n" in out
    values = run.history["loss"]
    assert values.shape == (hosts, 12)
    for rank in range(hosts):
        np.testing.assert_array_equal(values[rank], np.load(tmp_path / f"loss{rank}.npy"))
    assert 'job.train(step, data="train"' in (tmp_path / "runs" / run.id / "cells.py").read_text()


def test_a_fit_of_a_program_is_stored_by_step_and_epoch(tmp_path: Path) -> None:
    process = started(tmp_path, TENSORFLOW + CLOSE, KERAS_BACKEND="tensorflow")
    out = result(process)
    assert process.returncode == 0, out
    (run,) = nbdist.runs(tmp_path / "runs")
    assert (run.state.status, run.state.kind, run.state.epochs) == ("finished", "fit", 3)
    np.testing.assert_allclose(run.loss, np.load(tmp_path / "loss0.npy"), rtol=1e-6)
    assert run.state.header == "with job.cell():"
    assert "step 12 of 12" in repr(run)


def test_an_error_of_a_rank_is_the_error_of_the_run(tmp_path: Path) -> None:
    process = started(tmp_path, JAX + RAISE)
    assert "no such day" in result(process)
    failed, finished = nbdist.runs(tmp_path / "runs")
    state = ended(failed).state
    assert state.status == "failed"
    assert re.fullmatch(r"ValueError on rank 1@\S+: no such day", state.error)
    assert failed.output(1).count("ValueError: no such day") == 1
    assert state.workers[1].status == "failed"
    assert state.workers[0].status in ("dead", "failed")  # nbdist run may end it first
    assert finished.state.status == "finished"


@pytest.mark.full  # test_program_deaths.py kills rank 0
def test_a_killed_rank_0_ends_the_run(tmp_path: Path) -> None:
    process = started(tmp_path, JAX + KILL)
    assert repeat_until(lambda: newest_line(tmp_path).count("step 2, loss 2"), LIMIT_S, POLL_S)
    (tmp_path / "go").touch()
    result(process)
    run = ended(nbdist.runs(tmp_path / "runs")[0])
    assert run.state.status == "failed"
    # nbdist run may end rank 1 before it reports the end of rank 0
    assert re.fullmatch("rank 0(-1)? ended before the end of the cell", run.state.error)
    assert run.state.workers[0].status == "dead"
    assert repeat_until(lambda: not [*storing()], LIMIT_S, POLL_S)


def test_output_of_all_ranks_belongs_to_the_run(tmp_path: Path) -> None:
    process = started(tmp_path, JAX + WRITE + CLOSE)
    out = result(process)
    assert process.returncode == 0, out
    run = ended(nbdist.runs(tmp_path / "runs")[0])
    expected = "größer {0}\nab\ncareful\n"
    for rank in (0, 1):
        assert run.output(rank) == expected.format(rank)
        for line in (*expected.format(rank).splitlines(), "between cells"):
            assert f"[{rank}] {line}\n" in out
    assert "[0] from a fork\n" in out


@pytest.mark.full  # rare
def test_a_program_goes_on_when_its_store_has_ended(tmp_path: Path) -> None:
    process = started(tmp_path, JAX + FLOOD + CLOSE, hosts=1)
    out = result(process)
    assert process.returncode == 0, out[-2000:]
    assert out.count("x" * 1_000_000) == 40
    assert out.endswith("after the flood\n")


def test_without_telemetry_a_program_stores_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, JAX + CLOSE, hosts=1, NBDIST_TELEMETRY="0")
    out = result(process)
    assert process.returncode == 0, out
    assert not (tmp_path / "runs").exists()
    assert np.load(tmp_path / "loss0.npy").shape == (12,)


@pytest.mark.full  # rare
def test_a_folder_that_cannot_be_written_does_not_stop_the_program(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    process = started(tmp_path, JAX + CLOSE, hosts=1)
    out = result(process)
    assert process.returncode == 0, out
    assert "nbdist: this run is not stored" in out


@pytest.mark.full  # test_program_views.py follows a run
def test_a_notebook_follows_a_run_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(tmp_path, JAX + WAIT + CLOSE)
    runs = tmp_path / "runs"
    assert repeat_until(lambda: newest_line(tmp_path).count("step 2, loss 2"), LIMIT_S, POLL_S)
    assert nbdist.runs(runs)[0].state.status == "running"
    (tmp_path / "go").touch()
    run = follow(runs, Settings.from_environment())
    assert run.state.status == "finished"
    assert f"({run.state.short_id}): finished in" in capsys.readouterr().out
    assert run.loss.tolist() == [0.0, 1.0, 2.0]
    assert follow(runs / run.id, Settings.from_environment()).id == run.id
    result(process)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="no run in"):
            follow(folder, Settings.from_environment())
