"""Clusters on a real Open MPI and on doubles of PBS, Grid Engine, LSF and HTCondor."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.errors import StartError, UsageError
from nbdist.magics import options, start_options
from nbdist.magics.dist import DistMagics
from nbdist.utils.polling import repeat_until
from tests import exact, schedulers
from tests.exact import losses
from tests.schedulers import output_reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.usefixtures("own_folders")
needs_mpi = pytest.mark.skipif(
    shutil.which("mpiexec") is None, reason="mpiexec not installed (openmpi-bin)"
)

STEPS = 200
MPI = nbdist.Batch(launcher="mpi", listen="127.0.0.1", options=("--oversubscribe --bind-to none",))


@pytest.fixture(autouse=True)
def mpi_may_run_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


@pytest.fixture(autouse=True, scope="module")
def jobs_are_cancelled() -> Iterator[None]:
    """Wait until the background processes have cancelled all jobs."""
    yield
    assert repeat_until(lambda: not schedulers.cancelling(), 60)


def dial_in_processes(folder: Path) -> list[psutil.Process]:
    """Return the dial-in processes of the clusters in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "nbdist.cluster.schedulers.dial_in" in words and any(
            str(folder) in word for word in words
        ):
            found.append(process)
    return found


@needs_mpi
def test_open_mpi_workers_train(tmp_path: Path) -> None:
    with nbdist.Cluster(2, batch=MPI, framework="jax") as cluster:
        ranks = cluster.run("import os\nos.environ['OMPI_COMM_WORLD_RANK']").results
        assert ranks == {0: "'0'", 1: "'1'"}
        np.testing.assert_array_equal(exact.train(cluster, tmp_path, STEPS).loss, losses(STEPS))
    assert not dial_in_processes(tmp_path)


@needs_mpi
@pytest.mark.full  # a quarter of a minute
def test_mpi_job_is_restarted_after_a_death(tmp_path: Path) -> None:
    """Open MPI ends all processes of a job when one of them dies."""
    with nbdist.Cluster(2, batch=MPI, framework="jax") as cluster:
        run = exact.train(cluster, tmp_path, STEPS, meanwhile=dial_in_processes(tmp_path)[1].kill)
        np.testing.assert_array_equal(run.loss, losses(STEPS))
        assert len(run.recoveries) == 1
    assert repeat_until(lambda: not dial_in_processes(tmp_path), 5)


@needs_mpi
@pytest.mark.full  # a quarter of a minute
def test_mpi_job_ends_without_the_local_fork_server(tmp_path: Path) -> None:
    """Without the local fork server, the rendezvous process ends itself and the job."""
    with nbdist.Cluster(2, batch=MPI, framework="none") as cluster:
        assert dial_in_processes(tmp_path)
        os.kill(cluster._worker_group.engines.fleet.home.state.pid, signal.SIGKILL)
        assert repeat_until(lambda: not dial_in_processes(tmp_path), 10)
        cluster.restart()
        assert cluster.run("rank").results == {0: "0", 1: "1"}


@needs_mpi
@pytest.mark.full
def test_error_of_mpiexec_is_reported(tmp_path: Path) -> None:
    faulty = nbdist.Batch(launcher="mpi", listen="127.0.0.1", options=("--no-such-option",))
    with pytest.raises(StartError, match=r"(?s)mpiexec provides no hosts: .*no-such-option"):
        nbdist.Cluster(2, batch=faulty, framework="none")


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(n, marks=() if n == "pbs" else pytest.mark.full) for n in schedulers.COMMANDS],
)
def test_scheduler_double_runs_a_cluster(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    schedulers.install(commands, launcher)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    batch = nbdist.Batch(
        launcher=launcher,  # type: ignore[arg-type]
        listen="127.0.0.1",
        queue="" if launcher == "htcondor" else "long",
        time="" if launcher == "htcondor" else "60",
        gpus=8,
        options=("+Group = x" if launcher == "htcondor" else "-P project",),
    )
    (commands / "held").touch()

    def simulate() -> None:
        """Keep some tasks pending, make the scheduler unreachable for a moment, then start all."""
        assert repeat_until((commands / "looked").exists, 30)
        (commands / "down").touch()
        assert repeat_until(lambda: "cannot connect to server" in read_output(), 10)
        (commands / "down").unlink()
        (commands / "held").unlink()

    read_output = output_reader(capfd)

    thread = threading.Thread(target=simulate)
    thread.start()
    with nbdist.Cluster(3, batch=batch, framework="none") as cluster:
        thread.join()
        assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}
        assert len(dial_in_processes(tmp_path)) == 3
    assert f" job 12 is {WAITS[launcher]}" in read_output().replace("[]", "")
    assert repeat_until(lambda: not dial_in_processes(tmp_path), 5)
    assert (commands / "submitted").read_text().splitlines() == SCRIPTS[launcher](cluster._folder)
    assert repeat_until((commands / "refused").exists, 10), "nbdist repeats the cancellation"


WAITS = {
    "pbs": "queued, running",
    "sge": "qw, r",
    "lsf": "PEND, RUN".lower(),
    "htcondor": "idle, running",
}


def test_missing_launcher_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for launcher, command in (("slurm", "sbatch"), ("mpi", "mpiexec"), ("lsf", "bsub")):
        batch = nbdist.Batch(launcher=launcher, listen="127.0.0.1")  # type: ignore[arg-type]
        with pytest.raises(
            StartError, match=f"{command} is not installed here|cannot be submitted"
        ):
            nbdist.Cluster(1, batch=batch, framework="none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launcher": "banana"}, "--launcher banana: choose from slurm, pbs, "),
        ({"queue": "a b"}, "--partition 'a b': invalid characters"),
        ({"queue": "-x"}, "--partition '-x'"),
        ({"queue": "$(touch /tmp/x)"}, "--partition"),
        ({"time": "1\n#SBATCH -A me"}, "--time"),
        ({"time": "soon"}, "--time 'soon'"),
        ({"listen": "-oProxyCommand=x"}, "--listen"),
        ({"python": "/usr/bin/python; rm -rf x"}, "--python"),
        ({"gpus": -1}, "--gpus-per-host -1: use a whole number from 0"),
        ({"options": ("--account=x\nrm -rf x",)}, "--submit"),
        ({"options": ("",)}, "--submit ''"),
        ({"image": "python:3"}, "--image: not supported by slurm"),
        ({"launcher": "mpi", "queue": "long"}, "--partition: not supported by mpi"),
        ({"launcher": "mpi", "options": ("--host 'x",)}, "close the quote"),
        ({"listen": "0.0.0.0"}, "--listen 0.0.0.0: use one address"),
        ({"launcher": "htcondor", "time": "60"}, "--time: not supported by htcondor"),
        ({"launcher": "lsf", "time": "1:2:3:4"}, "--time 1:2:3:4: use the format 2:00:00"),
        ({"launcher": "mpi", "gpus": 8}, "--gpus-per-host: not supported by mpi"),
        ({"launcher": "htcondor", "queue": "long"}, "--partition: not supported by htcondor"),
        ({"launcher": "kubernetes"}, "needs --image"),
        ({"launcher": "kubernetes", "image": "-x"}, "--image '-x'"),
        ({"launcher": "kubernetes", "image": "x", "namespace": "A b"}, "--namespace"),
        ({"launcher": "kubernetes", "image": "x", "pod": "/no/such"}, "file not found"),
        (
            {"launcher": "kubernetes", "image": "x", "options": ("y",)},
            "--submit: not supported by kubernetes",
        ),
    ],
)
def test_invalid_batch_options_are_refused(changes: dict[str, object], message: str) -> None:
    batch = nbdist.Batch(**{"launcher": "slurm", **changes})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        nbdist.Cluster(2, batch=batch, framework="none")


@pytest.mark.parametrize("hosts", [0, -1, "gpu1", ["gpu1"], 1.5])
def test_invalid_number_of_hosts_is_refused(hosts: object) -> None:
    batch = nbdist.Batch(launcher="slurm")
    with pytest.raises(UsageError, match=r"need at least 1 host|chooses the hosts: use a number"):
        nbdist.Cluster(hosts, batch=batch, framework="none")  # type: ignore[arg-type]


def _shell_script(mark: str, *lines: str):
    def script(folder: Path) -> list[str]:
        directives = [f"{mark} {line}".replace("LOG", f"{folder}/log/job-1.log") for line in lines]
        call = f"exec {PYTHON} -m nbdist.cluster.schedulers.dial_in {folder}/job-1.json "
        return ["#!/bin/sh", *directives, call.rstrip()]

    return script


PYTHON = sys.executable
SCRIPTS = {
    "pbs": _shell_script(
        "#PBS",
        *("-N nbdist", "-j oe", "-o LOG", "-t 1-3"),
        *("-q long", "-l walltime=60", "-l select=1:ngpus=8", "-P project"),
    ),
    "sge": _shell_script(
        "#$",
        *("-N nbdist", "-S /bin/sh", "-j y", "-o LOG", "-t 1-3"),
        *("-q long", "-l h_rt=60", "-l gpu=8", "-P project"),
    ),
    "lsf": _shell_script(
        "#BSUB",
        *("-J nbdist[1-3]", "-o LOG", "-q long", "-W 60", '-gpu "num=8"', "-P project"),
    ),
    "htcondor": lambda folder: [
        "universe = vanilla",
        f"executable = {PYTHON}",
        f'arguments = "-m nbdist.cluster.schedulers.dial_in {folder}/job-1.json $(Process)"',
        "transfer_executable = False",
        f"output = {folder}/log/job-1.log",
        f"error = {folder}/log/job-1.log",
        "request_gpus = 8",
        "+Group = x",
        "queue 3",
    ],
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("4 hosts --partition gpu", "--partition without --launcher: choose one from slurm, "),
        ('4 --sbatch "--account=x"', "--submit without --launcher"),
        ("4 --gpus-per-host 8 --image x", "--gpus-per-host, --image without --launcher"),
        ("gpu1 gpu2 --launcher slurm", "slurm chooses the hosts: use their number, as in 4 hosts"),
        ("--hosts x.toml --launcher slurm", "slurm chooses the hosts"),
        ("0 hosts --launcher slurm", "need at least 1 host, got 0"),
        ("4 --launcher slurm --time soon", "--time 'soon'"),
        ("4 --launcher slurm --sbatch ''", "--submit ''"),
    ],
)
def test_invalid_start_line_is_refused(shell: InteractiveShell, line: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        shell.run_line_magic("dist_start", line)
    assert message in str(raised.value)


def test_start_line_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class RecordedCluster(dict):  # type: ignore[type-arg]
        def __init__(self, **arguments: object) -> None:
            super().__init__(arguments)

    monkeypatch.setattr(start_options, "Cluster", RecordedCluster)

    line = (
        '4 hosts --launcher slurm --partition "p" --time "2:00:00" --gpus-per-host 8 '
        "--sbatch \"--constraint='a|b'\" "
        '--sbatch "--account=x --qos=y" --sbatch=--exclusive --listen 10.0.0.1 -f jax'
    )
    recorded = start_options.started(options.parse(DistMagics.dist_start, line))
    assert (recorded["hosts"], recorded["framework"]) == (4, "jax")  # type: ignore[index]
    assert recorded["batch"] == nbdist.Batch(  # type: ignore[index]
        launcher="slurm",
        queue="p",
        time="2:00:00",
        gpus=8,
        options=("--constraint='a|b'", "--account=x --qos=y", "--exclusive"),
        listen="10.0.0.1",
    )
