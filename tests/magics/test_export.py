"""`%dist_export` and `%dist_submit` in a real kernel, after two trainings."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kernels import Kernel

LIMIT_S = 120
RUN = "%%dist_run --strategy pjrt"
STATE = f"""{RUN}
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
train = x, x.sum(1, keepdims=True)
w = jnp.zeros((4, 1))
"""
STEP = f"""{RUN} --data train --batch 16 --epochs {{epochs}} -o run
loss, g = jax.value_and_grad(lambda w: jnp.mean((batch[0] @ w - batch[1]) ** 2))(w)
w = w - {{rate}} * g
loss
"""


class Trained:
    """Kernel that has trained twice.

    Args:
        kernel: a kernel with two workers.

    Attributes:
        first: number of the cell of the first training, which has the learning rate 0.125.
        first_run: short id of its run.
        second: number of the cell of the second training, which has the learning rate 0.0625.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        kernel.run(STATE).check()
        kernel.run(STEP.format(epochs=2, rate=0.125)).check()
        self.first, self.first_run = self.value("len(In) - 2, run.state.short_id")
        kernel.run(STEP.format(epochs=1, rate=0.0625)).check()
        self.second = self.value("len(In) - 2")

    def value(self, code: str) -> object:
        """Return the value of an expression in the kernel."""
        found: object = ast.literal_eval(self.run(f"print(repr(({code})))"))
        return found

    def run(self, code: str) -> str:
        """Run a cell and return its text."""
        return self._kernel.run(code).check().stdout

    def refused(self, code: str) -> str:
        """Run a cell that fails, and return its error."""
        done = self._kernel.run(code)
        assert done.status == "error"
        return done.traceback + done.stderr

    def program(self, line: str, folder: Path) -> str:
        """Export a training, and return its program and the text of the magic."""
        shown = self.run(f"%dist_export {folder} {line}")
        return (folder / "train.py").read_text() + shown


@pytest.fixture(scope="module")
def trained(kernel: Kernel) -> Iterator[Trained]:
    return Trained(kernel)


def test_the_newest_training_is_exported(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    text = trained.program("", folder)
    assert f"nbdist: wrote {folder}/ with cell [{trained.second}]: run nbdist run" in text
    assert "--hosts 2" in text
    assert text.index("0.125 * g") < text.index("0.0625 * g")  # the first one is its beginning
    assert {path.name for path in folder.iterdir()} >= {"requirements.txt", "README.md"}
    assert "exists: choose another folder" in trained.refused(f"%dist_export {folder}")


def test_a_cell_or_a_run_chooses_a_training(trained: Trained, tmp_path: Path) -> None:
    by_cell = trained.program(f"--cell {trained.first}", tmp_path / "cell")
    by_run = trained.program(f"--run {trained.first_run}", tmp_path / "run")
    for text in (by_cell, by_run):
        assert f"with cell [{trained.first}]: run" in text
        assert "0.125 * g" in text
        assert "0.0625" not in text
    for choice in ("--cell 99", "--run abcdef"):
        target = tmp_path / "other"
        error = trained.refused(f"%dist_export {target} {choice}")
        assert "has not trained on these workers: cells (and runs) are" in error
        assert f"[{trained.first}] ({trained.first_run})" in error
        assert not target.exists()


def test_a_launcher_has_its_file_and_options(trained: Trained, tmp_path: Path) -> None:
    line = "--launcher slurm --partition gpu --time 0:10:00 --gpus-per-host 2 --submit '-A lab'"
    shown = trained.program(line, tmp_path / "slurm")
    assert "nbdist: train.sbatch starts it on other hosts" in shown
    script = (tmp_path / "slurm" / "train.sbatch").read_text()
    for word in ("--partition=gpu", "--time=0:10:00", "-A lab", "--nodes=2"):
        assert word in script
    trained.program("--launcher kubernetes --image train:1 --kind jobset", tmp_path / "pods")
    assert "kind: JobSet" in (tmp_path / "pods" / "job.yaml").read_text()
    target = tmp_path / "other"
    assert "leave out --partition" in trained.refused(f"%dist_export {target} --partition gpu")
    assert "--launcher" in trained.refused(f"%dist_export {target} --launcher cloud")
    assert not target.exists()


@pytest.mark.full  # end_to_end/test_submitted_jobs.py submits with the magic
def test_a_submitted_job_has_its_training_and_arguments(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    runs = f"import os; os.environ['NBDIST_RUNS_FOLDER'] = {str(tmp_path / 'runs')!r}"
    trained.run(runs)
    choice = f"--cell {trained.first} --run {trained.first_run}"
    line = f"%dist_submit {folder} {choice} --launcher local --detach -o job -- --epochs 3"
    shown = trained.run(line)
    assert "nbdist: submitted local job in train/\n" in shown
    job = nbdist.job(folder)
    assert job.wait(LIMIT_S) == "finished", job.logs()
    assert job.run.state.epochs == 3
    assert "0.0625" not in (folder / "train.py").read_text()
    assert trained.value("job.state, job.run.id") == ("finished", job.run.id)


def test_wrong_lines_submit_nothing(trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "train"
    for line, error in (
        ("--launcher kubernetes", "--launcher"),
        ("--launcher ssh", "--launcher ssh needs the names of hosts"),
        ("--time 0:10:00", "leave out --time"),
        ("-o 'not a name'", "not a name"),
        ("-- --epochs 'one", "the options after -- cannot be read: No closing quotation"),
        ("--cell 99", "cell [99] has not trained on these workers"),
    ):
        assert error in trained.refused(f"%dist_submit {target} {line}")
    assert not target.exists()
