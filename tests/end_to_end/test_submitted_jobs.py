"""Jobs of `%dist_submit`: real programs under a supervisor process, Open MPI and Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.cluster.schedulers import jobs
from nbdist.errors import StartError, UsageError
from nbdist.jobs import submission
from nbdist.records import Writer
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import is_alive
from tests import clusters
from tests.end_to_end.test_exported_programs import TRAININGS, run_cells
from tests.netns import Hosts
from tests.runs import losses, new_run
from tests.slurm import Slurm, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.magics.dist import DistMagics
    from nbdist.session.submission import SubmittedJob

LIMIT_S = 120
POLL_S = 0.1
HOST_DIED_S = 60.0
FOREVER = ("--epochs", "100000")


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[nbdist.Cluster, nbdist.Run]]:
    """Provide a cluster that has trained, and its run."""
    with clusters.cluster(hosts=2, framework="jax") as cluster:
        yield cluster, run_cells(cluster, TRAININGS["pjrt step"])


@pytest.fixture
def cluster(
    trained: tuple[nbdist.Cluster, nbdist.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> nbdist.Cluster:
    """Provide the cluster, with an empty folder of runs."""
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path / "runs"))
    return trained[0]


@pytest.fixture
def started(cluster: nbdist.Cluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    """Provide a job that has a run, and trains until it is cancelled."""
    job = cluster.submit(str(tmp_path / "train"), arguments=FOREVER)
    yield ended_first_steps(job)
    job.cancel()
    assert job.wait(LIMIT_S) in ("stopped", "failed")


def ended_first_steps(job: SubmittedJob) -> SubmittedJob:
    assert repeat_until(lambda: bool(job.runs) or job.state == "failed", LIMIT_S, POLL_S)
    assert job.state == "running", job.logs()
    return job


def test_job_gives_the_losses_of_the_notebook(
    trained: tuple[nbdist.Cluster, nbdist.Run], cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    job = cluster.submit(str(tmp_path / "train"))
    assert job.wait(LIMIT_S) == "finished", job.logs()
    np.testing.assert_array_equal(job.run.loss, trained[1].loss)
    assert len(job.runs) == 1
    assert job.run.state.job_folder == str(job.folder)
    assert "epoch 2 " in job.logs()
    again = nbdist.job(tmp_path / "train")
    assert (again.state, again.run.id) == ("finished", job.run.id)
    assert repr(again) == "<nbdist local job in train/: finished>"
    assert again.run.state.workers[1].status == "finished"


def test_magic_shows_the_job_and_stores_it(
    cluster: nbdist.Cluster,
    tmp_path: Path,
    shell: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    front: DistMagics = shell.magics_manager.registry["DistMagics"]
    monkeypatch.setattr(front, "_started", cluster)
    shell.run_line_magic("dist_submit", f"{tmp_path / 'train'} -o job -- --epochs 3")
    monkeypatch.setattr(front, "_started", None)
    out = capsys.readouterr().out
    job = shell.user_ns["job"]
    assert job.run.state.epochs == 3
    lines = [line for line in out.splitlines() if "local job" in line]
    assert lines == [
        "nbdist: local job in train/: running",
        "nbdist: local job in train/: finished",
    ]
    assert f"({job.run.state.short_id}): finished in" in out


def resumed(job: SubmittedJob) -> SubmittedJob:
    """Resume a stopped job, and wait until it continues from its checkpoint."""
    (before,) = job.runs
    job.resume()

    def has_continued() -> bool:
        return len(job.runs) > 1 and len(job.run.to_dataframe()) > 0

    assert repeat_until(lambda: has_continued() or job.state == "failed", LIMIT_S, POLL_S)
    assert job.state == "running", job.logs()
    assert nbdist.job(job.folder).runs == job.runs
    assert job.runs[1] == before
    assert "resumed from the checkpoint of step" in job.logs()
    return job


def test_job_outlives_its_view_and_continues_after_a_cancellation(
    started: SubmittedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt ends the view only. A cancelled job saves a checkpoint."""

    def interrupt() -> None:
        shown = repeat_until(lambda: "(last step)" in seen(), LIMIT_S, POLL_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert shown

    texts: list[str] = []

    def seen() -> str:
        texts.append(capsys.readouterr().out)
        return "".join(texts)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started.follow()
    thread.join()
    assert "the view has ended, and local job in train/ goes on" in seen()
    assert started.state == "running"
    started.cancel()
    assert started.wait(LIMIT_S) == "stopped", started.logs()
    assert ": stopped (it can continue from its checkpoint)" in repr(started)
    assert list((started.folder / "checkpoints").glob("step-*"))
    assert started.run.state.status in ("stopped", "interrupted")
    last = started.run.to_dataframe()["step"].max()
    assert resumed(started).run.to_dataframe()["step"].min() == last + 1


def test_failed_program_is_a_failed_job(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = cluster.submit(str(tmp_path / "train"), arguments=["--epochs", "many"])
    job.follow()
    assert job.state == "failed"
    shown = capsys.readouterr()
    assert "local job in train/: failed (exit status 2)" in shown.out
    assert "invalid int value: 'many'" in shown.err
    assert job.wait() == "failed"
    with pytest.raises(UsageError, match=r"has no run with values: job.logs\(\) "):
        _ = job.run


def test_killed_supervisor_ends_the_program(started: SubmittedJob) -> None:
    process = submission.read(started.folder).process
    assert process is not None
    supervisor = psutil.Process(process.pid)
    ranks = supervisor.children(recursive=True)
    assert len(ranks) >= 2
    supervisor.kill()
    assert started.wait(LIMIT_S) == "failed"
    assert "its process was killed" in repr(started)
    assert repeat_until(lambda: not any(map(is_alive, ranks)), LIMIT_S, POLL_S)


@pytest.mark.full  # rare
def test_job_that_is_cancelled_at_once_is_stopped(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    job = cluster.submit(str(tmp_path / "train"), arguments=FOREVER)
    job.cancel()
    assert job.wait(LIMIT_S) == "stopped", job.logs()
    shutil.rmtree(job.folder)
    with pytest.raises(UsageError, match="contains no submitted job"):
        nbdist.job(job.folder)


@pytest.mark.full  # rare
def test_job_without_a_record_is_cancelled(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {process.pid for process in psutil.Process().children()}

    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(submission.msgspec.json, "encode", full)
    with pytest.raises(OSError, match="No space left"):
        cluster.submit(str(tmp_path / "train"), arguments=FOREVER)
    monkeypatch.undo()
    assert not (tmp_path / "train").exists()
    own = psutil.Process()
    assert repeat_until(lambda: {p.pid for p in own.children()} <= before, LIMIT_S, POLL_S)


def of_another_host(folder: Path) -> SubmittedJob:
    """Return a job that a host started which no longer responds."""
    record = (
        '{"id": "a", "launcher": "local", "number": "", "submitted": 0.0, '
        f'"runs": "{folder / "runs"}", "process": {{"host": "gpu1", "pid": 1, "started": 1.0}}}}'
    )
    (folder / "job.json").write_text(record)
    return nbdist.job(folder)


def test_job_of_another_host_is_not_cancelled(tmp_path: Path) -> None:
    job = of_another_host(tmp_path)
    assert job.state == "unknown"
    assert "it was started on gpu1, which does not respond" in repr(job)
    with pytest.raises(UsageError, match="cancel it there"):
        job.cancel()


def test_view_of_a_job_ends_when_its_host_has_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(host="gpu1", pid=2, started=1.0)
    run = new_run(tmp_path / "runs", job="a", writer=writer)
    run.take(losses(1, 3))
    run.close()
    job = of_another_host(tmp_path)
    began = time.monotonic()
    job.follow()
    assert time.monotonic() - began < HOST_DIED_S
    assert "step 3, loss" in capsys.readouterr().out


def test_wrong_requests_write_nothing(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "train"
    with pytest.raises(UsageError, match="contains no submitted job"):
        nbdist.job(target)
    with pytest.raises(UsageError, match="needs the names of hosts"):
        cluster.submit(str(target), launch="ssh")
    with pytest.raises(UsageError, match="cannot submit to kubernetes: choose from local"):
        cluster.submit(str(target), launch=nbdist.Batch("kubernetes", image="train"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch is not installed here"):
        cluster.submit(str(target), launch=nbdist.Batch("slurm"))
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'no such partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(StartError, match="no such partition"):
        cluster.submit(str(target), launch=nbdist.Batch("slurm"))
    assert not target.exists()
    target.mkdir()
    with pytest.raises(UsageError, match="exists: choose another folder"):
        cluster.submit(str(target))


@pytest.mark.full  # test_program_starts.py starts a program with Open MPI
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not installed (openmpi-bin)")
def test_open_mpi_runs_a_job(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    job = cluster.submit(str(tmp_path / "train"), launch=nbdist.Batch("mpi"))
    assert job.wait(LIMIT_S) == "finished", job.logs()
    assert len(job.run.state.workers) == 2
    long = cluster.submit(str(tmp_path / "long"), launch=nbdist.Batch("mpi"), arguments=FOREVER)
    ended_first_steps(long)
    long.cancel()
    assert long.wait(LIMIT_S) == "stopped", long.logs()
    assert "it can continue from its checkpoint" in repr(long)


@needs_slurm
def test_slurm_runs_a_job(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is queued on a partition that is down, and one finishes."""
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
        waiting = cluster.submit(str(tmp_path / "w"), launch=nbdist.Batch("slurm", queue="shut"))
        assert re.fullmatch(r"<nbdist Slurm job \d+ in w/: queued \(.*Down.*\)>", repr(waiting))
        waiting.cancel()
        assert waiting.wait(LIMIT_S) == "stopped"
        job = cluster.submit(str(tmp_path / "train"), launch=nbdist.Batch("slurm", time="10"))
        assert job.wait(LIMIT_S) == "finished", job.logs()
        assert len(job.run.state.workers) == 2
        assert "epoch 2 " in job.logs()


@needs_slurm
@pytest.mark.full  # the same without Slurm
def test_cancelled_job_of_slurm_continues(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
        launch = nbdist.Batch("slurm", time="10")
        long = cluster.submit(str(tmp_path / "long"), launch=launch, arguments=FOREVER)
        ended_first_steps(long)
        long.cancel()
        assert long.wait(LIMIT_S) == "stopped", long.logs()
        resumed(long).cancel()
        assert long.wait(LIMIT_S) == "stopped", long.logs()


SLOW_SBATCH = """#!/bin/sh
{sbatch} "$@" >{folder}/number || exit
exec sleep 60
"""
"""Double of an `sbatch` that queues the job, but does not respond."""


@needs_slurm
@pytest.mark.full  # tests/jobs/test_submission.py cancels such a job
def test_job_of_an_sbatch_that_does_not_respond_is_cancelled(
    cluster: nbdist.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(SLOW_SBATCH.format(sbatch=shutil.which("sbatch"), folder=tmp_path))
    sbatch.chmod(0o755)
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(jobs, "COMMAND_S", 5.0)
        launch = nbdist.Batch("slurm", queue="shut")
        with pytest.raises(StartError, match=r"5 s: nbdist has cancelled the job train-\w{12} in"):
            cluster.submit(str(tmp_path / "train"), launch=launch)
        assert int((tmp_path / "number").read_text()) > 0
        assert slurm.jobs() == {}
        assert not (tmp_path / "train").exists()
        (tmp_path / "scancel").write_text("#!/bin/sh\nexec sleep 60\n")  # it does not respond too
        (tmp_path / "scancel").chmod(0o755)
        with pytest.raises(StartError, match=r"`scancel --name=train-\w{12}` cancels it") as raised:
            cluster.submit(str(tmp_path / "train"), launch=launch)
        (tmp_path / "scancel").unlink()
        assert len(slurm.jobs()) == 1
        subprocess.run(shlex.split(str(raised.value).split("`")[1]), check=True, timeout=LIMIT_S)
        assert slurm.jobs() == {}
