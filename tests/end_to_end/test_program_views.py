"""Views of a program that trains: the page, TensorBoard, and a notebook that follows its run."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.records import RunList, RunTable, StateMessage, TableMessage
from nbdist.session.tensorboard import Boards
from nbdist.utils.polling import repeat_until
from tests.end_to_end.test_program_runs import LIMIT_S, POLL_S, newest_line, result, started
from tests.kernels import Kernel
from tests.server.jupyter import JupyterServer
from tests.session.test_tensorboard import response

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

TRAIN = """
import os, threading
import nbdist
job = nbdist.script("pjrt", seed=3)
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
w = jnp.zeros((4, 1))
update = jax.jit(jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2)))

step = 0

with job.cell(guard=0):  # the ranks may end after different steps
    while not os.path.exists("go"):
        loss, gradient = update(w)
        w = w - 0.001 * gradient
        step += 1
        job.report(step=step, loss=loss)
        print("step", step, "of rank", job.rank)
        threading.Event().wait(0.02)
job.close()
"""
"""Program that trains until the file `go` exists."""


def expected(steps: np.ndarray) -> np.ndarray:
    """Return the losses of these steps, with shape (steps,), computed in double precision."""
    x = np.random.default_rng(0).normal(size=(64, 4))
    y, w = x.sum(1, keepdims=True), np.zeros((4, 1))
    losses = np.empty(steps.max())
    for step in range(steps.max()):
        error = x @ w - y
        losses[step] = np.mean(error**2)
        w -= 0.001 * 2 / 64 * x.T @ error
    return losses[steps - 1]


@dataclass(frozen=True)
class Program:
    """A program that trains, and stores its run in the folder of a Jupyter server.

    Attributes:
        folder: folder of the program.
        process: its launcher.
        runs: folder of its run.
        id: id of the run.
    """

    folder: Path
    process: subprocess.Popen[str]
    runs: Path
    id: str

    def end(self) -> None:
        """Let it end, and wait for that."""
        (self.folder / "go").touch()
        out = result(self.process)
        assert self.process.returncode == 0, out


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    with JupyterServer(tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def program(server: JupyterServer, tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "runs").symlink_to(server.runs)
    process = started(tmp_path, TRAIN, NBDIST_RUNS_FOLDER=str(server.runs))
    try:
        assert repeat_until(
            lambda: re.search(r"train\.py.*: running, .*loss", newest_line(tmp_path)) is not None,
            LIMIT_S,
            POLL_S,
        )
        yield Program(tmp_path, process, server.runs, nbdist.runs(server.runs)[0].id)
    finally:
        (tmp_path / "go").touch()
        if process.poll() is None:
            process.communicate(timeout=LIMIT_S)


def test_the_page_lists_and_streams_the_run(server: JupyterServer, program: Program) -> None:
    runs = msgspec.json.decode(server.get("nbdist/runs")[1], type=RunList).runs
    listed = {run.id: run for run in runs}[program.id]
    assert (listed.status, listed.program, len(listed.workers)) == ("running", "train.py", 2)
    table = msgspec.json.decode(server.get("nbdist/runs/table")[1], type=RunTable)
    row = {row.state.id: row for row in table.rows}[program.id]
    assert row.step >= 1
    assert row.metrics.keys() == {"loss"}

    async def watch() -> None:
        async with (
            server.watch(program.id) as tab,
            server.watch(program.id, query="rank=1") as log,
        ):
            history = await tab.history()
            tables = [message for message in history if isinstance(message, TableMessage)]
            (own,) = (one.table for one in tables if one.table.columns.own == ("loss",))
            assert isinstance(history[0], StateMessage)
            names = own.columns.names
            ranks: set[float] = set()
            while ranks != {0, 1}:
                values = await tab.rows(own.number, len(names), 1)
                ranks |= set(values[:, names.index("rank")])
            assert "step 2 of rank 1\nstep 3 of rank 1\n" in await log.text(400)
            program.end()
            state = (await tab.status("finished")).state
            assert [worker.status for worker in state.workers] == ["finished", "finished"]

    asyncio.run(watch())


@pytest.mark.full  # tests/session/test_tensorboard.py covers TensorBoard
def test_tensorboard_has_the_values(
    server: JupyterServer, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page opens it behind the Jupyter server, and the magic opens it on this machine."""
    tags, name = "data/plugin/scalars/tags", f"{program.id}/events/rank-1"

    def behind_the_server() -> bool:
        status, body = server.get(f"nbdist-tensorboard/{tags}")
        return status == 200 and name in body.decode()

    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(program.runs))
    boards = Boards()
    try:
        assert repeat_until(behind_the_server, LIMIT_S, POLL_S)
        address = boards.open().address
        response(address, tags, name)

        def values() -> np.ndarray:
            """Return a sample of the values, a row each: time, step, loss."""
            found = response(address, f"data/plugin/scalars/scalars?run={name}&tag=loss", "")
            return np.array(found)

        later = values()[-1, 1] + 20
        assert repeat_until(lambda: values()[-1, 1] > later, LIMIT_S, POLL_S)
        assert program.process.poll() is None
        _, steps, losses = values().T
        np.testing.assert_allclose(losses, expected(steps.astype(int)), rtol=1e-3, atol=1e-9)
    finally:
        boards.close()


@pytest.mark.full  # the next test follows the run in a shell
def test_a_notebook_follows_the_run_to_its_end(program: Program) -> None:
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist").check()
        kernel.run("import os; os.environ['NBDIST_VIEW'] = 'text'").check()
        request = kernel.send(f"%dist_attach --run {program.runs} -o run")
        kernel.wait_for_text(request, "running")
        program.end()
        shown = kernel.collect(request).check().stdout
        assert f"({program.id[-6:]}): finished in" in shown
        own = "print(run.state.status, run.id, len(run.loss))"
        status, run, steps = kernel.run(own).check().stdout.split()
        assert (status, run) == ("finished", program.id)
        log = kernel.run("print(run.output(0) + run.output(1))").check().stdout
        assert f"step {steps} of rank" in log


def test_a_shell_follows_the_run(
    program: Program, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    (program.folder / "go").touch()
    shell.run_line_magic("dist_attach", f"--run {program.runs / program.id} -o run")
    assert f"({program.id[-6:]}): finished in" in capsys.readouterr().out
    program.end()
    run = shell.user_ns["run"]
    assert (run.state.status, run.id) == ("finished", program.id)
    with pytest.raises(UsageError, match="--run follows a job, not a cluster: leave out the id"):
        shell.run_line_magic("dist_attach", "abcdef012345 --run runs")
