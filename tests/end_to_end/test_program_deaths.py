"""Ranks of programs that are killed: the program ends with one error that names the rank."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import nbdist
from nbdist.jobs import folder
from nbdist.jobs.launch_files import launch_files
from nbdist.records import Batch
from nbdist.utils.polling import repeat_until
from tests.end_to_end.test_exported_programs import command
from tests.end_to_end.test_program_starts import of_tensorflow
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOSTS = 2
LIMIT_S = 120
END_S = 60
POLL_S = 0.1

PJRT = """
import threading
import jax, jax.numpy as jnp, numpy as np
import nbdist
job = nbdist.script("pjrt", seed=1)
w = jnp.zeros((4, 1))

def step(batch):
    global w
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(w)
    w = w - 0.01 * gradient
    return loss
"""
MIRRORED = """
import threading
import keras, numpy as np, tensorflow as tf
import nbdist
job = nbdist.script("mirrored", seed=1)
with job.strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)

def step(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(batch) - 1.0) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
"""
TRAIN = """
def batches():
    for number in range(1000):
        if number == 20 and job.rank in {waiting}:
            open(f"reached{{job.rank}}", "w").close()
            threading.Event().wait()
        yield np.ones((8, 4), "float32")

job.train(step, data="batches")
job.close()
"""
"""The ranks that do not wait are in a collective with them."""

STRATEGIES = {"pjrt": PJRT, "mirrored": MIRRORED}


class Started:
    """Processes of a program that a launcher has started.

    Args:
        target: folder of the program.
        launcher: `hand`, `nbdist run` or `mpirun`.
    """

    def __init__(self, target: Path, launcher: str) -> None:
        self.by_hand = launcher == "hand"
        ports = free_ports(HOSTS)
        env = os.environ | {
            "NBDIST_RUNS_FOLDER": str(target / "runs"),
            "MASTER_PORT": str(ports[0]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        texts = launch_files(
            Batch("mpi"), name="x", hosts=[""] * HOSTS, checkpoint=False, python=""
        )
        (target / "mpirun.sh").write_text(texts["mpirun.sh"])
        commands = {"nbdist run": command(), "mpirun": ["sh", "mpirun.sh"]}
        starts: list[tuple[list[str], dict[str, str]]] = [
            ([sys.executable, folder.PROGRAM], of_tensorflow(rank, ports)) for rank in range(HOSTS)
        ]
        if not self.by_hand:
            starts = [(commands[launcher], {})]
        self._errors = target / "errors"
        with self._errors.open("ab") as errors, (target / "output").open("ab") as output:
            self.processes = [
                subprocess.Popen(words, cwd=target, env=env | own, stdout=output, stderr=errors)
                for words, own in starts
            ]

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        if self.by_hand:
            return psutil.Process(self.processes[number].pid)
        names = ("RANK", "OMPI_COMM_WORLD_RANK")
        children = psutil.Process(self.processes[0].pid).children(recursive=True)
        programs = (child for child in children if child.cmdline()[1:2] == [folder.PROGRAM])
        (found,) = (p for p in programs if str(number) in map(p.environ().get, names))
        return found

    def statuses(self) -> list[int]:
        """Wait until all processes have ended, and return their exit statuses."""
        return [process.wait(END_S) for process in self.processes]

    def errors(self) -> str:
        """Return the error output."""
        return self._errors.read_text()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait(END_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Return a function that starts a program and waits until its ranks wait."""
    every: list[Started] = []

    def begin(launcher: str, strategy: str, waiting: set[int]) -> Started:
        program = STRATEGIES[strategy] + TRAIN.format(waiting=waiting)
        (tmp_path / folder.PROGRAM).write_text(program)
        started = Started(tmp_path, launcher)
        every.append(started)

        def has_reached() -> bool:
            return all((tmp_path / f"reached{rank}").exists() for rank in waiting)

        assert repeat_until(has_reached, LIMIT_S, POLL_S), started.errors()
        return started

    yield begin
    for started in every:
        started.close()


NAMED = {
    "hand": r"nbdist: rank (\d)@\S+ ended before the end of the program",
    "nbdist run": r"nbdist: rank (\d) failed: its process was killed \(SIGKILL\)",
    "mpirun": r"process rank (\d) with PID \d+ on node \S+ exited on signal 9",
}
"""Error of each launcher. Without one, the other ranks write it."""

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("launcher", "strategy", "waiting", "killed"),
    [
        pytest.param("hand", "pjrt", {1}, 1, marks=FULL),
        ("hand", "pjrt", {0, 1}, 1),
        ("hand", "pjrt", {0}, 0),
        pytest.param("hand", "mirrored", {1}, 1, marks=FULL),
        ("nbdist run", "pjrt", {1}, 1),
        pytest.param("mpirun", "pjrt", {1}, 1, marks=FULL),
        pytest.param("hand", "mirrored", {0, 1}, 1, marks=FULL),
        pytest.param("hand", "mirrored", {0}, 0, marks=FULL),
        pytest.param("nbdist run", "mirrored", {1}, 1, marks=FULL),
        pytest.param("mpirun", "mirrored", {1}, 1, marks=FULL),
    ],
)
def test_killed_rank_ends_the_program_with_one_error(
    start: Callable[..., Started],
    tmp_path: Path,
    launcher: str,
    strategy: str,
    waiting: set[int],
    killed: int,
) -> None:
    """The other rank is in a collective, or waits for something else."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun not installed (openmpi-bin)")
    started = start(launcher, strategy, waiting)
    started.rank(killed).kill()
    statuses = started.statuses()
    errors = started.errors()
    if launcher == "hand":
        assert statuses == [-signal.SIGKILL if rank == killed else 1 for rank in range(HOSTS)]
    else:
        assert statuses == [128 + signal.SIGKILL], errors
    assert re.findall(NAMED[launcher], errors) == [str(killed)], errors
    assert "Traceback" not in errors
    assert "run the cell" not in errors
    assert sum(len(re.findall(pattern, errors)) for pattern in NAMED.values()) == 1
    (run,) = nbdist.runs(tmp_path / "runs")
    assert repeat_until(lambda: run.state.is_over, LIMIT_S, POLL_S)
    assert run.state.status == "failed"
    if launcher == "hand":
        assert run.state.error == f"rank {killed} ended before the end of the cell"
