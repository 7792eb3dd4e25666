"""Submitted programs under a real supervisor process. The programs are scripts of the shell."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

import nbdist
from nbdist.errors import StartError, UsageError
from nbdist.jobs import submission
from nbdist.jobs.supervisor import PROGRAM
from nbdist.records import Writer
from nbdist.utils.files import replace_file
from nbdist.utils.polling import repeat_until
from nbdist.utils.processes import is_gone, process_of
from tests.runs import new_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import ProgramJob
    from nbdist.session.submission import SubmittedJob

pytestmark = pytest.mark.processes
LIMIT_S = 30
STUBBORN = """
trap 'echo asked' TERM
echo begun
while [ ! -e end ]; do sleep 0.05; done
"""
"""Program that ends only when the file `end` exists."""

REPEATED = """
echo "$KEY $NBDIST_JOB $*"
[ -e again ] && exit 0
touch again
exit 75
"""
"""Program that asks for another start, and then finishes."""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[ProgramJob]:
    """Provide a job whose program reports SIGTERM and goes on."""
    (tmp_path / "run.sh").write_text(STUBBORN)
    job = submission.start(tmp_path, "local", (), {}, tmp_path / "runs")
    assert repeat_until(lambda: output(job, tmp_path) == "begun\n", LIMIT_S)
    assert repeat_until((tmp_path / PROGRAM).exists, LIMIT_S)
    yield job
    (tmp_path / "end").touch()
    assert repeat_until(lambda: submission.state_of(job, tmp_path).is_over, LIMIT_S)


def output(job: ProgramJob, folder: Path) -> str:
    return submission.output(job, folder)


def kill_supervisor(job: ProgramJob) -> None:
    assert job.process is not None
    supervisor = psutil.Process(job.process.pid)
    supervisor.kill()
    supervisor.wait(LIMIT_S)


def test_program_runs_until_its_own_end_without_its_supervisor(
    stubborn: ProgramJob, tmp_path: Path
) -> None:
    kill_supervisor(stubborn)
    assert repeat_until(lambda: output(stubborn, tmp_path) == "begun\nasked\n", LIMIT_S)
    state = submission.state_of(stubborn, tmp_path)
    assert state == ("running", "its supervisor was killed")
    submission.cancel(stubborn, tmp_path)
    assert repeat_until(lambda: output(stubborn, tmp_path) == "begun\nasked\nasked\n", LIMIT_S)
    assert not submission.state_of(stubborn, tmp_path).is_over
    (tmp_path / "end").touch()
    assert repeat_until(lambda: submission.state_of(stubborn, tmp_path).is_over, LIMIT_S)
    state = submission.state_of(stubborn, tmp_path)
    assert state == ("failed", "its process was killed")


def test_state_of_a_job_of_another_host(stubborn: ProgramJob, tmp_path: Path) -> None:
    """The folder is shared. The name of the host is changed: there is one host in this test."""
    assert stubborn.process is not None
    process = msgspec.structs.replace(stubborn.process, host="gpu1")
    there = msgspec.structs.replace(stubborn, process=process)
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(there))
    assert submission.state_of(there, tmp_path) == ("running", "on gpu1")
    before = time.time() - 600
    os.utime(tmp_path / PROGRAM, (before, before))
    state = submission.state_of(there, tmp_path)
    assert state == ("unknown", "it was started on gpu1, which does not respond")
    with pytest.raises(UsageError, match="may still run"):
        submission.resume(tmp_path)
    (tmp_path / "end").touch()
    assert repeat_until((tmp_path / "exit-status").exists, LIMIT_S)
    assert submission.state_of(there, tmp_path) == ("finished", "")


def handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler of a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.full)])
def test_supervisor_shows_other_hosts_that_it_runs(
    tmp_path: Path, stubborn: ProgramJob, *, early: bool
) -> None:
    """The test sends the signal of the supervisor's timer, or waits for it."""
    path = tmp_path / PROGRAM
    program = msgspec.json.decode(path.read_bytes(), type=Writer)
    assert program != stubborn.process
    os.utime(path, (0, 0))
    assert stubborn.process is not None
    supervisor = stubborn.process.pid
    assert repeat_until(lambda: handles(supervisor, signal.SIGALRM), LIMIT_S)
    if early:
        os.kill(supervisor, signal.SIGALRM)
    assert repeat_until(lambda: path.stat().st_mtime > 0, LIMIT_S)


def test_resumed_job_has_its_arguments_and_variables(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(REPEATED)
    arguments = ("--epochs", "3 4")
    first = submission.start(tmp_path, "local", arguments, {"KEY": "secret"}, tmp_path / "runs")
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600
    job, other = nbdist.job(tmp_path), nbdist.job(tmp_path)
    assert job.wait(LIMIT_S) == other.wait(LIMIT_S) == "stopped"
    job.resume()
    assert other.wait(LIMIT_S) == "finished", job.logs()
    assert job.state == nbdist.job(tmp_path).state == "finished"
    assert job.logs() == 2 * f"secret {first.id} --epochs 3 4\n"


@pytest.fixture
def stopped(tmp_path: Path) -> SubmittedJob:
    """Provide a job that has asked for another start. Its next start runs until `end` exists."""
    begin = f"if [ -e again ]; then {STUBBORN} exit 0; fi"
    (tmp_path / "run.sh").write_text(REPEATED.replace("[ -e again ] && exit 0", begin))
    submission.start(tmp_path, "local", (), {"KEY": "k"}, tmp_path / "runs")
    job = nbdist.job(tmp_path)
    assert job.wait(LIMIT_S) == "stopped"
    return job


@pytest.mark.full  # rare
def test_one_of_two_notebooks_resumes_a_job(stopped: SubmittedJob, tmp_path: Path) -> None:
    outcomes: list[str] = []
    both = threading.Barrier(2)

    def resume() -> None:
        both.wait(LIMIT_S)
        try:
            nbdist.job(tmp_path).resume()
        except UsageError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("resumed")

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    refused, resumed = sorted(outcomes, key="resumed".__eq__)
    assert resumed == "resumed"
    assert re.search("another notebook resumes the job|the local job is running", refused)
    assert repeat_until(lambda: "begun" in stopped.logs(), LIMIT_S)
    (tmp_path / "end").touch()
    assert stopped.wait(LIMIT_S) == "finished"
    assert stopped.logs().count("begun") == 1
    with (tmp_path / "job.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another notebook resumes the job in .*: nbdist.job"):
            stopped.resume()


@pytest.mark.full  # rare
def test_job_that_cannot_start_again_keeps_its_state(
    stopped: SubmittedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, logs = repr(stopped), stopped.logs()
    (tmp_path / ".job.json.new").mkdir()  # `job.json` cannot be replaced
    with pytest.raises(IsADirectoryError):
        stopped.resume()
    assert (repr(stopped), stopped.logs()) == (before, logs)
    (tmp_path / ".job.json.new").rmdir()
    monkeypatch.setenv("PATH", str(tmp_path))  # without a shell
    with pytest.raises(StartError, match=r"`sh run.sh` cannot be started in .*: .*'sh'$"):
        stopped.resume()
    monkeypatch.undo()
    assert (repr(stopped), stopped.logs()) == (before, logs)
    assert "it can continue from its checkpoint" in before
    stopped.resume()
    assert repeat_until(lambda: "begun" in stopped.logs(), LIMIT_S)
    (tmp_path / "end").touch()
    assert stopped.wait(LIMIT_S) == "finished"


def test_start_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_START_S", 0.0)  # Python itself needs longer
    (tmp_path / "run.sh").write_text("touch begun; exec sleep 600\n")
    with pytest.raises(StartError, match="the supervisor has not started it within 0 s"):
        submission.start(tmp_path, "local", (), {}, tmp_path / "runs")
    job = submission.read(tmp_path)
    assert repeat_until(lambda: submission.state_of(job, tmp_path).is_over, LIMIT_S)
    assert not (tmp_path / "begun").exists()


DOUBLES = {
    "sbatch": "#!/bin/sh\necho $$ >{folder}/new\nmv {folder}/new {folder}/asked\nexec sleep 60\n",
    "scancel": "#!/bin/sh\necho $* >{folder}/cancelled\n",
}
"""Doubles of Slurm's commands: `sbatch` does not respond, and `scancel` stores its options."""


def test_interrupted_submission_to_slurm_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in DOUBLES.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def interrupt() -> None:
        assert repeat_until((tmp_path / "asked").exists, LIMIT_S)
        for pid in (os.getpid(), int((tmp_path / "asked").read_text())):  # as a terminal does
            os.kill(pid, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        submission.start(tmp_path, "slurm", (), {}, tmp_path / "runs")
    thread.join()
    cancelled = (tmp_path / "cancelled").read_text()
    assert re.fullmatch(r"--name=test-interrupted-[a-z0-9-]+-[0-9a-f]{12}\n", cancelled)


def test_slurm_job_without_a_number_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wordy = "#!/bin/sh\necho 'welcome to the cluster'\n"
    for name, text in (("sbatch", wordy), ("scancel", DOUBLES["scancel"])):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(StartError, match="no number of a job: 'welcome to the cluster': nbdist"):
        submission.start(tmp_path, "slurm", (), {}, tmp_path / "runs")
    assert (tmp_path / "cancelled").read_text().startswith("--name=test-slurm-job")


def test_only_ended_jobs_are_resumed(stubborn: ProgramJob, tmp_path: Path) -> None:
    job = nbdist.job(tmp_path)
    with pytest.raises(UsageError, match="the local job is running: wait for its end, or cancel"):
        job.resume()
    (tmp_path / "end").touch()
    assert job.wait(LIMIT_S) == "finished"
    moved = shutil.move(tmp_path, tmp_path.with_name("elsewhere"))
    with pytest.raises(UsageError, match="was deleted: submit the training again"):
        job.resume()
    shutil.move(moved, tmp_path)
    assert submission.read(tmp_path) == stubborn


# Stop of a run in the page.

OTHER_USER = 12345


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Provide the folder of a job whose supervisor and program have ended."""
    folder = tmp_path / "ended"
    folder.mkdir()
    (folder / "run.sh").write_text("exit 0\n")
    job = submission.start(folder, "local", (), {}, tmp_path / "runs")
    assert repeat_until(lambda: submission.state_of(job, folder).is_over, LIMIT_S)
    assert job.process is not None
    process = job.process
    assert repeat_until(lambda: is_gone(process), LIMIT_S)
    return folder


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Provide a process of this user that belongs to no job."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(LIMIT_S)


def stop(folder: Path, job_folder: Path) -> None:
    """Cancel the job in `job_folder` as the page does. Its id is that of the job in `folder`."""
    state = new_state(program="train.py", job=submission.read(folder).id)
    submission.cancellation_of(msgspec.structs.replace(state, job_folder=str(job_folder)))()


def name_process(folder: Path, process: subprocess.Popen[bytes]) -> None:
    replace_file(folder / PROGRAM, msgspec.json.encode(process_of(process.pid)), 0o644)


def test_stop_signals_the_program_without_its_supervisor(
    ended: Path, victim: subprocess.Popen[bytes]
) -> None:
    name_process(ended, victim)
    stop(ended, ended)
    assert victim.wait(LIMIT_S) == -signal.SIGTERM


def test_files_of_a_job_are_writable_only_by_their_owner(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("exit 0\n")
    mask = os.umask(0o002)
    try:
        submission.start(tmp_path, "local", (), {}, tmp_path / "runs")
        assert nbdist.job(tmp_path).wait(LIMIT_S) == "finished"
    finally:
        os.umask(mask)
    for name in ("job.json", PROGRAM):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644


@pytest.mark.parametrize("attack", ["job-link", "program-link", "folder-link", "writable"])
def test_stop_refuses_files_that_others_could_choose(
    ended: Path, victim: subprocess.Popen[bytes], tmp_path: Path, attack: str
) -> None:
    folder = tmp_path / "attack"
    folder.mkdir()
    name_process(folder, victim)
    if attack == "job-link":
        (folder / "job.json").symlink_to(ended / "job.json")
    else:
        shutil.copy(ended / "job.json", folder)
    if attack == "program-link":
        (folder / PROGRAM).rename(tmp_path / PROGRAM)
        (folder / PROGRAM).symlink_to(tmp_path / PROGRAM)
    elif attack == "writable":
        (folder / PROGRAM).chmod(0o664)
    elif attack == "folder-link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    with pytest.raises(UsageError, match="cannot be read"):
        stop(ended, folder)
    assert victim.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("foreign", ["", "job.json", PROGRAM])
def test_stop_refuses_files_of_another_user(
    ended: Path, victim: subprocess.Popen[bytes], foreign: str
) -> None:
    name_process(ended, victim)
    os.chown(ended / foreign, OTHER_USER, -1)
    with pytest.raises(UsageError, match="another user owns it"):
        stop(ended, ended)
    assert victim.poll() is None
