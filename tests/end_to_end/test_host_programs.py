"""Exported programs on hosts of real sshd: `hosts.sh`, jobs over ssh, Open MPI with a hostfile."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import nbdist
from nbdist.jobs import folder
from nbdist.utils.polling import repeat_until
from tests.end_to_end.test_exported_programs import (
    TRAININGS,
    export,
    run_cells,
    with_results,
)
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

pytestmark = needs_hosts

HOSTS = 2
LIMIT_S = 150
POLL_S = 0.1
EPOCHS = ("--epochs", "400")
FOREVER = ("--epochs", "100000")
SHOW_INTERFACE = """print("NCCL uses", __import__("os").environ.get("NCCL_SOCKET_IFNAME"))"""
MPI = nbdist.Batch("mpi", options=("-x PATH -x PYTHONPATH",))


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(HOSTS) as network:
        yield network


@pytest.fixture(scope="module")
def trained(network: Hosts) -> Iterator[nbdist.Cluster]:
    """Provide a cluster on the hosts that has trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
        with nbdist.Cluster(hosts=network.names, framework="jax") as cluster:
            run_cells(cluster, TRAININGS["pjrt step"])
            yield cluster


@pytest.fixture
def cluster(
    trained: nbdist.Cluster, network: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> nbdist.Cluster:
    """Provide the cluster, with an empty folder of runs, and variables for the launchers."""
    variables = {
        "NBDIST_SSH_CONFIG": str(network.ssh_config),
        "NBDIST_RUNS_FOLDER": str(tmp_path / "runs"),
        "PYTHON": sys.executable,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_plm_rsh_agent": f"ssh -F {network.ssh_config}",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return trained


def start(target: Path, *command: str, **env: str) -> subprocess.Popen[bytes]:
    with (target / "log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=target, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT
        )


def await_epoch(running: subprocess.Popen[bytes], target: Path) -> None:
    """Wait until the third epoch has ended."""

    def has_ended() -> bool:
        return "epoch 3 " in (target / "log").read_text() or running.poll() is not None

    assert repeat_until(has_ended, LIMIT_S, POLL_S)
    assert running.poll() is None, (target / "log").read_text()


def ranks(network: Hosts) -> list[psutil.Process]:
    """Return the processes of the program on each host."""
    every = (process for host in network.each for process in host.processes())
    return [process for process in every if process.cmdline()[1:2] == [folder.PROGRAM]]


@pytest.mark.full  # the job below is stopped and continues
def test_hosts_script_saves_after_sigterm_and_continues(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    training, target = TRAININGS["pjrt step"], tmp_path / "train"
    export(cluster, target, run="", cell=len(training.cells), launch="ssh")
    with_results(target, training)
    whole = tmp_path / "whole"
    shutil.copytree(target, whole)
    running = start(whole, "bash", "hosts.sh", "--", *EPOCHS)
    assert running.wait(LIMIT_S) == 0, (whole / "log").read_text()
    running = start(target, "bash", "hosts.sh", "--", *EPOCHS)
    await_epoch(running, target)
    running.terminate()
    assert running.wait(LIMIT_S) == 75, (target / "log").read_text()
    assert "stopped by SIGTERM after step" in (target / "log").read_text()
    running = start(target, "bash", "hosts.sh", "--", *EPOCHS)
    assert running.wait(LIMIT_S) == 0, (target / "log").read_text()
    for rank in range(HOSTS):
        found, expected = (np.load(p / f"result{rank}.npz") for p in (target, whole))
        np.testing.assert_array_equal(found["weights"], expected["weights"])


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("mpi", marks=pytest.mark.full)])
def test_killed_rank_ends_the_program_on_all_hosts(
    cluster: nbdist.Cluster, network: Hosts, tmp_path: Path, launcher: str
) -> None:
    if launcher == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("mpirun not installed (openmpi-bin)")
    target = tmp_path / "train"
    export(cluster, target, launch="ssh" if launcher == "ssh" else MPI)
    (target / "hosts.txt").write_text("".join(f"{name} slots=1\n" for name in network.names))
    path = target / folder.PROGRAM
    path.write_text(path.read_text().replace("job.train(", f"{SHOW_INTERFACE} or job.train("))
    script = ("bash", "hosts.sh", "--") if launcher == "ssh" else ("sh", "mpirun.sh")
    running = start(target, *script, *FOREVER, HOSTFILE="hosts.txt")
    await_epoch(running, target)
    both = ranks(network)
    assert len(both) == HOSTS
    both[1].send_signal(signal.SIGKILL)
    assert running.wait(LIMIT_S) not in (0, 75)
    shown = (target / "log").read_text()
    named = r"rank 1 on (?:node )?\S+ failed with|process rank 1 with PID \d+ on node \S+ exited"
    assert len(re.findall(named, shown)) == 1, shown
    assert "Traceback" not in shown
    assert shown.count("NCCL uses =eth0") == HOSTS
    assert repeat_until(lambda: not ranks(network), LIMIT_S, POLL_S)


def test_job_over_ssh_is_cancelled_and_continues(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    job = cluster.submit(str(tmp_path / "train"), launch="ssh", arguments=FOREVER)
    assert repeat_until(lambda: bool(job.runs) or job.state == "failed", LIMIT_S, POLL_S)
    assert job.state == "running", job.logs()
    assert len({worker.host for worker in job.run.state.workers}) == HOSTS
    job.cancel()
    assert job.wait(LIMIT_S) == "stopped", job.logs()
    assert "it can continue from its checkpoint" in repr(job)
    job.resume()
    assert repeat_until(lambda: len(job.runs) > 1 or job.state == "failed", LIMIT_S, POLL_S)
    assert "resumed from the checkpoint of step" in job.logs()
    job.cancel()
    assert job.wait(LIMIT_S) == "stopped", job.logs()
