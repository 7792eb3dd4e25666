"""Scripts of jobs, and their states in the output of each scheduler."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.schedulers import jobs
from nbdist.cluster.schedulers.dialects import SCHEDULERS
from nbdist.cluster.schedulers.jobs import SUBMITTED, BatchJob, MpiJob
from nbdist.errors import StartError
from nbdist.records import Batch, JobState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

USER = pwd.getpwuid(os.getuid()).pw_name
SUBMISSIONS = {
    "slurm": "Submitted batch job 12",
    "pbs": "12[].head",
    "sge": 'Your job-array 12.1-3:1 ("nbdist") has been submitted',
    "lsf": "Job <12> is submitted to default queue <normal>.",
    "htcondor": "Submitting job(s).\n3 job(s) submitted to cluster 12.",
}
"""Outputs of the commands that submit a job."""


class Commands:
    """Double of a scheduler's commands.

    Attributes:
        output: output of the next command.
        error: error of the next command; empty if it works.
        ran: commands so far.
        inputs: standard inputs of the commands.
    """

    def __init__(self) -> None:
        self.output = self.error = ""
        self.ran: list[list[str]] = []
        self.inputs: list[str | None] = []

    def run(self, command: list[str], input: str | None = None) -> str:  # noqa: A002 - as `_run`
        self.ran.append(command)
        self.inputs.append(input)
        if self.error:
            raise StartError(self.error)
        return self.output


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    double = Commands()
    monkeypatch.setattr(jobs, "run_command", double.run)
    monkeypatch.setattr(jobs, "_is_missing", lambda _program: False)
    monkeypatch.setattr(jobs, "_is_pbs_pro", lambda: False)
    return double


def new_job(folder: Path, launcher: str, places: int = 3, **options: object) -> BatchJob:
    (folder / "log").mkdir(exist_ok=True)
    batch = Batch(launcher=launcher, **options)  # type: ignore[arg-type]
    return BatchJob(batch, 1, tuple(range(places)), folder)


def submitted(folder: Path, commands: Commands, launcher: str, **options: object) -> BatchJob:
    """Return a job that the scheduler has accepted with the id 12."""
    job = new_job(folder, launcher, **options)
    commands.output = SUBMISSIONS[launcher]
    job.submit(folder / "ticket")
    return job


def state(folder: Path, commands: Commands, launcher: str, output: str) -> JobState:
    """Return the state of job 12, from the output of the command that shows it."""
    job = submitted(folder, commands, launcher)
    commands.output = output
    return job.state()


def script(folder: Path) -> list[str]:
    return (folder / "job-1.sh").read_text().splitlines()


# Scripts.


def test_a_script_contains_the_requested_options(tmp_path: Path, commands: Commands) -> None:
    job = submitted(
        tmp_path,
        commands,
        "slurm",
        queue="gpu",
        time="2:00:00",
        gpus=8,
        options=("--account=x", "--constraint='a|b'"),
        python="~/env/bin/python",
    )
    lines = script(tmp_path)
    wanted = ["--partition=gpu", "--time=2:00:00", "--gpus-per-node=8", "--account=x"]
    start = lines.index("#SBATCH --partition=gpu")
    assert lines[start : start + 5] == [f"#SBATCH {w}" for w in (*wanted, "--constraint='a|b'")]
    assert f"#SBATCH --job-name=nbdist-{tmp_path.name}-1" in lines
    assert "#SBATCH --nodes=3" in lines
    python = os.path.expanduser("~/env/bin/python")  # noqa: PTH111 - independent of the module
    assert lines[-1].endswith(f"{python} -m nbdist.cluster.schedulers.dial_in {tmp_path}/ticket")
    assert commands.ran == [["sbatch", str(tmp_path / "job-1.sh")]]
    assert str(job) == "Slurm job 12"


def test_options_that_were_not_given_are_absent(tmp_path: Path, commands: Commands) -> None:
    submitted(tmp_path, commands, "slurm")
    assert not [line for line in script(tmp_path) if "partition" in line or "time" in line]
    assert sys.executable in script(tmp_path)[-1]


@pytest.mark.parametrize(
    ("places", "is_pro", "array"),
    [(3, False, ["-t 1-3"]), (3, True, ["-J 1-3"]), (1, False, []), (1, True, [])],
)
def test_pbs_has_an_array_for_several_hosts(
    tmp_path: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    places: int,
    is_pro: bool,
    array: list[str],
) -> None:
    monkeypatch.setattr(jobs, "_is_pbs_pro", lambda: is_pro)
    submitted(tmp_path, commands, "pbs", places=places)
    directives = [line for line in script(tmp_path) if line.startswith("#PBS -")]
    assert [d.removeprefix("#PBS ") for d in directives if d[5:7] in ("-t", "-J")] == array


@pytest.mark.parametrize(("time", "minutes"), [("30", 30), ("0:30", 1), ("1:30", 2), ("1-0", 1440)])
def test_lsf_gets_the_script_as_input_and_minutes_rounded_up(
    tmp_path: Path, commands: Commands, time: str, minutes: int
) -> None:
    submitted(tmp_path, commands, "lsf", time=time)
    assert commands.ran == [["bsub"]]
    assert commands.inputs == [(tmp_path / "job-1.sh").read_text()]
    assert f"#BSUB -W {minutes}" in script(tmp_path)


def test_lsf_gets_other_options_unchanged(tmp_path: Path, commands: Commands) -> None:
    submitted(tmp_path, commands, "lsf", queue="gpu1-2", time="1-2")
    assert {"#BSUB -q gpu1-2", "#BSUB -W 1560"} <= set(script(tmp_path))


def test_an_output_without_an_id_is_an_error(tmp_path: Path, commands: Commands) -> None:
    job = new_job(tmp_path, "slurm")
    commands.output = "submitted, probably"
    with pytest.raises(StartError, match=r"^Slurm jobs cannot be submitted: "):
        job.submit(tmp_path / "ticket")
    assert str(job) == "Slurm job"


# Cancellation.


@pytest.mark.parametrize(
    ("launcher", "command"),
    [("pbs", ["qdel", "12[]"]), ("sge", ["qdel", "12"]), ("lsf", ["bkill", "12"])],
)
def test_a_submitted_job_is_cancelled_by_its_id(
    tmp_path: Path, commands: Commands, launcher: str, command: list[str]
) -> None:
    assert new_job(tmp_path, launcher).ending() == []
    assert submitted(tmp_path, commands, launcher).end() == command


def test_slurm_cancels_by_name_even_before_the_id_is_known(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = ["scancel", f"--name=nbdist-{tmp_path.name}-1"]
    assert new_job(tmp_path, "slurm").ending() == by_name
    monkeypatch.setattr(jobs, "_is_missing", lambda program: program == "scancel")
    assert new_job(tmp_path, "slurm").ending() == []
    assert submitted(tmp_path, commands, "slurm").ending()[-1] == "12"


# States.


@pytest.mark.parametrize("launcher", SCHEDULERS)
def test_a_job_without_an_id_is_submitted(
    tmp_path: Path, commands: Commands, launcher: str
) -> None:
    assert new_job(tmp_path, launcher).state() == SUBMITTED
    assert commands.ran == []


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("slurm", ["scontrol", "show", "job", "--oneliner", "12"]),
        ("pbs", ["qstat", "-f", "-t", "12[]"]),
        ("sge", ["qstat", "-u", USER]),
        ("lsf", ["bjobs", "-noheader", "-o", "stat", "12"]),
        ("htcondor", ["condor_q", "-format", "%d\n", "JobStatus", "12"]),
    ],
)
def test_the_state_is_queried_by_id(
    tmp_path: Path, commands: Commands, launcher: str, command: list[str]
) -> None:
    state(tmp_path, commands, launcher, "")
    assert commands.ran[-1] == command


@pytest.mark.parametrize(
    ("launcher", "output", "expected"),
    [
        ("slurm", "JobId=12 JobState=RUNNING Reason=None", JobState(word="RUNNING")),
        ("slurm", "JobId=12 JobState=COMPLETED", JobState(word="COMPLETED", over=True)),
        ("slurm", "JobState=RUNNING Restarts=2", JobState(word="RUNNING", restarts=2)),
        ("pbs", "job_state = Q\njob_state = R", JobState(word="queued, running", waits=True)),
        ("pbs", "job_state = B\njob_state = R\njob_state = R", JobState(word="running")),
        ("pbs", "job_state = F\njob_state = X", JobState(word="F, X", over=True)),
        ("pbs", "job_state = F\njob_state = R", JobState(word="running")),
        ("sge", " 12 0.5 nbdist me qw now", JobState(word="qw", waits=True)),
        ("sge", " 12 0.5 nbdist me r now", JobState(word="r")),
        ("sge", " 12 0.5 nbdist me Eqw now", JobState(word="Eqw", over=True)),
        ("sge", "12 0.5 n me Eqw x\n12 0.5 n me r x", JobState(word="Eqw, r")),
        ("sge", " 112 0.5 nbdist me r now", JobState(word="", over=True)),
        ("sge", "", JobState(word="", over=True)),
        ("lsf", "PEND\nPEND\nRUN\n", JobState(word="PEND, RUN", waits=True)),
        ("lsf", "DONE\nEXIT\n", JobState(word="DONE, EXIT", over=True)),
        ("lsf", "", JobState(word="")),
        ("htcondor", "1\n2\n", JobState(word="idle, running", waits=True)),
        ("htcondor", "5\n", JobState(word="held", over=True)),
        ("htcondor", "4\n2\n", JobState(word="running")),
        ("htcondor", "", JobState(word="", over=True)),
    ],
)
def test_the_state_is_read_from_the_output(
    tmp_path: Path, commands: Commands, launcher: str, output: str, expected: JobState
) -> None:
    assert state(tmp_path, commands, launcher, output) == expected


@pytest.mark.parametrize(
    ("fields", "detail", "is_over"),
    [
        ("Reason=Resources StartTime=Unknown", "Resources", False),
        ("Reason=None StartTime=N/A", "", False),
        (
            "Reason=Nodes_required_are_DOWN StartTime=2026-11-25T08:00:00",
            "Nodes required are DOWN, expected start 2026-11-25 08:00:00",
            False,
        ),
        ("Reason=PartitionTimeLimit StartTime=Unknown", "PartitionTimeLimit", True),
    ],
)
def test_a_pending_job_of_slurm_has_its_reason_and_expected_start(
    tmp_path: Path, commands: Commands, fields: str, detail: str, is_over: bool
) -> None:
    found = state(tmp_path, commands, "slurm", f"JobState=PENDING {fields}")
    assert found == JobState(word="PENDING", detail=detail, waits=not is_over, over=is_over)


def test_the_start_of_a_running_job_is_not_expected(tmp_path: Path, commands: Commands) -> None:
    output = "JobState=RUNNING Reason=None StartTime=2026-11-25T08:00:00"
    assert state(tmp_path, commands, "slurm", output).detail == ""


@pytest.mark.parametrize(
    "error",
    [
        "slurm_load_jobs error: Invalid job id specified",
        "qstat: Unknown Job Id 12[]",
        "Job <12> is not found",
        "Following jobs do not exist: 12",
    ],
)
def test_a_job_that_the_scheduler_has_forgotten_is_over(
    tmp_path: Path, commands: Commands, error: str
) -> None:
    job = submitted(tmp_path, commands, "lsf")
    commands.error = error
    assert job.state() == JobState(word="", detail=error, over=True)


def test_another_error_of_the_scheduler_is_raised(tmp_path: Path, commands: Commands) -> None:
    job = submitted(tmp_path, commands, "lsf")
    commands.error = "cannot connect to server"
    with pytest.raises(StartError, match=r"^cannot connect to server$"):
        job.state()


def test_the_log_is_truncated_to_its_last_lines(tmp_path: Path, commands: Commands) -> None:
    job = new_job(tmp_path, "slurm")
    assert job.log_tail() == ""
    (tmp_path / "log" / "job-1.log").write_text("".join(f"line {n}\n" for n in range(7)))
    assert job.log_tail().splitlines() == [f"line {n}" for n in range(2, 7)]


# Commands.


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the commands of LSF. It is the only one in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bsub", "bjobs"):
        (folder / name).touch(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def replace_run(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Replace `subprocess.run`, so that no process starts."""
    monkeypatch.setattr(jobs.subprocess, "run", run)


@pytest.mark.usefixtures("scheduler")
def test_variables_of_the_notebooks_own_job_do_not_reach_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: object) -> object:
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, SUBMISSIONS["lsf"], "")

    own = ("SLURM_JOB_ID", "SLURM_PROCID", "PBS_JOBID", "SGE_TASK_ID", "LSB_JOBID", "PMI_RANK")
    others = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "PBS_DEFAULT", "SGE_ROOT", "MY_PMI_RANK")
    for name in (*own, "OMPI_COMM_WORLD_RANK", "PMIX_ID", *others):
        monkeypatch.setenv(name, "1")
    replace_run(monkeypatch, run)
    new_job(tmp_path, "lsf").submit(tmp_path / "ticket")
    kept = {name for name in seen if name.startswith(("SLURM", "PBS", "SGE", "LSB", "PMI", "OMPI"))}
    assert kept == set(others) - {"MY_PMI_RANK"}
    assert "MY_PMI_RANK" in seen


@pytest.mark.parametrize(
    ("code", "errors", "message"),
    [(1, "  no such queue\n", "no such queue"), (3, "\n", "bsub ended with exit code 3")],
)
@pytest.mark.usefixtures("scheduler")
def test_the_error_of_a_failed_command_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, errors: str, message: str
) -> None:
    done = subprocess.CompletedProcess(["bsub"], code, SUBMISSIONS["lsf"], errors)
    replace_run(monkeypatch, lambda *_, **__: done)
    with pytest.raises(StartError, match=f"^{message}$"):
        new_job(tmp_path, "lsf").submit(tmp_path / "ticket")


@pytest.mark.usefixtures("scheduler")
def test_a_command_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, timeout: float, **_: object) -> object:
        raise subprocess.TimeoutExpired(command, timeout)

    replace_run(monkeypatch, run)
    with pytest.raises(StartError, match=r"^bsub did not end within 30 s$"):
        new_job(tmp_path, "lsf").submit(tmp_path / "ticket")


def test_a_missing_command_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=r"^sbatch is not installed here$"):
        new_job(tmp_path, "slurm").submit(tmp_path / "ticket")
    batch = Batch(launcher="mpi", options=("--host 'a b'",))
    mpi = MpiJob(batch, 1, (0, 1), tmp_path)
    with pytest.raises(StartError, match=r"^mpiexec is not installed here$"):
        mpi.submit(tmp_path / "ticket")
    assert mpi.state() == SUBMITTED
    assert (mpi.ending(), mpi.end()) == ([], [])
