"""Exported programs as jobs of a real Slurm: numbers, continuation after SIGTERM, dead ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.cluster.schedulers import jobs
from nbdist.jobs import folder
from nbdist.utils.polling import repeat_until
from tests import clusters
from tests.end_to_end.test_exported_programs import (
    TRAININGS,
    export,
    launch,
    run_cells,
    with_results,
)
from tests.netns import Hosts
from tests.slurm import Slurm, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    needs_slurm,
    pytest.mark.full,  # test_submitted_jobs.py runs a job; test_launch_files.py requeues
]

HOSTS = 2
LIMIT_S = 180
POLL_S = 0.1
EPOCHS = ("--epochs", "100")
FOREVER = ("--epochs", "100000")


class Program(NamedTuple):
    """An exported program, and its results under `nbdist run`, by rank."""

    folder: Path
    expected: dict[int, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def network() -> Iterator[Slurm]:
    with Hosts(HOSTS) as hosts, Slurm(hosts) as slurm:
        yield slurm


@pytest.fixture
def slurm(network: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Slurm]:
    """Slurm without jobs. Its jobs use the Python of the tests and their own folder of runs."""
    monkeypatch.setenv("SLURM_CONF", str(network.conf))
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    yield network
    for number in network.jobs():
        network.cancel(number)
    assert repeat_until(lambda: not network.jobs(), LIMIT_S, POLL_S)


@pytest.fixture(scope="module", params=["pjrt step", "mirrored step"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    training = TRAININGS[request.param]
    target = tmp_path_factory.mktemp("exported") / "train"
    framework = "jax" if training.strategy == "pjrt" else "tensorflow"
    with clusters.cluster(hosts=HOSTS, framework=framework) as cluster:
        run_cells(cluster, training)
        export(cluster, target, run="", cell=len(training.cells), launch=nbdist.Batch("slurm"))
    with_results(target, training)
    ended = launch(target, *EPOCHS)
    assert ended.returncode == 0, ended.stderr
    return Program(target, results(target))


@pytest.fixture
def copied(program: Program, tmp_path: Path) -> Path:
    """Provide a copy of the program without results."""
    target = tmp_path / "train"
    shutil.copytree(program.folder, target, ignore=shutil.ignore_patterns("result*"))
    return target


def results(target: Path) -> dict[int, dict[str, np.ndarray]]:
    return {rank: dict(np.load(target / f"result{rank}.npz")) for rank in range(HOSTS)}


def submit(target: Path, *words: str) -> str:
    """Submit the program with words of `sbatch` and of the program, and return the job's number."""
    command = ["sbatch", "--parsable", *words]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def log(target: Path) -> str:
    return "".join(path.read_text() for path in target.glob("*.log"))


def state(number: str) -> str:
    return jobs.state_of("slurm", number).word


def await_state(number: str, word: str, target: Path) -> None:
    ends = {word, "COMPLETED", "FAILED", "CANCELLED"}
    repeat_until(lambda: state(number) in ends, LIMIT_S, POLL_S)
    assert state(number) == word, log(target)


def await_epoch(number: str, target: Path) -> None:
    """Wait until the third epoch has ended."""
    assert repeat_until(
        lambda: "\nepoch 3 " in log(target) or state(number) == "FAILED", LIMIT_S, POLL_S
    )
    assert state(number) == "RUNNING", log(target)


def assert_weights_are_equal(program: Program, target: Path) -> None:
    for rank, values in results(target).items():
        np.testing.assert_array_equal(values["weights"], program.expected[rank]["weights"])


def test_ranks_on_one_host_give_the_numbers_of_the_program(
    slurm: Slurm, program: Program, copied: Path
) -> None:
    number = submit(copied, "--nodes=1", "--ntasks-per-node=2", "train.sbatch", *EPOCHS)
    await_state(number, "COMPLETED", copied)
    assert_weights_are_equal(program, copied)
    for rank, values in results(copied).items():
        np.testing.assert_array_equal(values["loss"], program.expected[rank]["loss"])


@pytest.mark.parametrize("reason", ["signal", "requeue"])
def test_stopped_job_is_requeued_and_continues_from_its_checkpoint(
    slurm: Slurm, program: Program, copied: Path, reason: str
) -> None:
    """SIGTERM from a user, or from the preemption of the whole job."""
    number = submit(copied, "train.sbatch", *EPOCHS)
    await_epoch(number, copied)
    if reason == "signal":
        slurm.cancel(number, "--signal=TERM")
    else:
        slurm.control("requeue", number)
    await_state(number, "PENDING", copied)
    before = log(copied)
    assert "stopped by SIGTERM after step" in before
    assert "epoch 100 " not in before
    slurm.control("update", f"JobId={number}", "StartTime=now+3seconds")  # instead of 2 minutes
    await_state(number, "COMPLETED", copied)
    assert "resumed from the checkpoint of step" in log(copied)
    assert "epoch 1 " not in log(copied)[len(before) :]
    assert_weights_are_equal(program, copied)
    assert not list(copied.glob(".continues*"))


def test_job_is_requeued_before_its_time_limit(slurm: Slurm, copied: Path) -> None:
    number = submit(copied, "--time=3", "train.sbatch", *FOREVER)
    await_epoch(number, copied)
    assert repeat_until(lambda: state(number) == "PENDING", LIMIT_S, POLL_S), log(copied)
    assert "stopped by SIGTERM after step" in log(copied)
    assert list((copied / "checkpoints").glob("step-*"))


def test_killed_rank_ends_the_job_with_one_error(slurm: Slurm, copied: Path) -> None:
    number = submit(copied, "train.sbatch", *FOREVER)
    await_epoch(number, copied)
    ranks = [p for p in psutil.process_iter() if is_rank(p, number)]
    assert len(ranks) == HOSTS
    victim = next(p for p in ranks if p.environ()["SLURM_PROCID"] == "1")
    victim.kill()
    await_state(number, "FAILED", copied)
    shown = log(copied)
    assert re.findall(r"srun: error: \S+: task (\d): Exited with exit code 137", shown) == ["1"]
    assert "Traceback" not in shown
    assert "ended before the end of the program" not in shown
    assert not any(p.is_running() for p in ranks)


def is_rank(process: psutil.Process, number: str) -> bool:
    try:
        is_program = process.cmdline()[1:2] == [folder.PROGRAM]
        return is_program and process.environ().get("SLURM_JOB_ID") == number
    except psutil.Error:
        return False
