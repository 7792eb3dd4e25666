"""Files that start an exported program on several hosts.

Doubles of `ssh`, `mpirun` and Slurm's commands start the ranks on this machine. Tests of
`end_to_end` run the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)

from nbdist.errors import UsageError
from nbdist.jobs.launch_files import launch_files
from nbdist.records import Batch
from nbdist.utils.polling import repeat_until
from tests.kubernetes_double import VERSION

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

PROGRAM = """
import os, sys
names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
with open("seen" + os.environ.get("RANK", ""), "w") as file:
    file.write(repr(([os.environ.get(name) for name in names], sys.argv[1:])))
with open("job" + os.environ.get("RANK", ""), "w") as file:
    file.write(os.environ.get("NBDIST_JOB", ""))
if "--status" in sys.argv:
    sys.exit(int(sys.argv[-1]))
if "--fail" in sys.argv and os.environ["RANK"] == "1":
    sys.exit(3)
if "--fail" in sys.argv:
    import time
    time.sleep(60)
"""
DOUBLES = {
    "ssh": """#!/bin/sh
for word in "$@"; do last=$word; done
exec env -u NBDIST_JOB sh -c "$last"
""",
    "srun": """#!/bin/sh
while [ "$1" != sh ]; do shift; done
exec "$@"
""",
    "scontrol": '#!/bin/sh\necho "$@"\n',
    "mpirun": """#!/bin/sh
printf "%s " "$@" > words
while [ "$1" != python ]; do shift; done
exec "$@"
""",
}


def files(launch: Any, hosts: int = 2, *, names: bool = False) -> dict[str, str]:
    named = [f"gpu{i}" if names else "" for i in range(hosts)]
    return launch_files(launch, name="my Train!", hosts=named, checkpoint=True, python="3.11")


def prepare(folder: Path, text: str, program: str) -> None:
    """Write a script beside a program, and the doubles of the launchers' commands."""
    (folder / "train.py").write_text(program)
    (folder / "script.sh").write_text(text)
    for name, double in DOUBLES.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(double)
        (folder / "bin" / name).chmod(0o755)


def with_doubles(folder: Path, **env: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **env}


def start(
    folder: Path, text: str, shell: str, *words: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script beside a program, with the doubles of the launchers' commands."""
    prepare(folder, text, PROGRAM)
    return subprocess.run(
        [shell, "script.sh", *words],
        cwd=folder,
        env=with_doubles(folder, **env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def seen(folder: Path, rank: int | str) -> Any:
    return eval((folder / f"seen{rank}").read_text())


def test_slurm_script_contains_the_options() -> None:
    batch = Batch("slurm", queue="gpu", time="2:00:00", gpus=4, options=("--account=x",))
    lines = files(batch, 3)["train.sbatch"].splitlines()
    for option in (
        *("--job-name=my-train", "--nodes=3", "--ntasks-per-node=1", "--requeue"),
        *("--partition=gpu", "--time=2:00:00", "--gpus-per-node=4", "--account=x"),
    ):
        assert f"#SBATCH {option}" in lines
    assert '\' sh --checkpoint checkpoints "$@"' in lines


@pytest.mark.parametrize(
    ("status", "requeued"),
    [(75, True), *(pytest.param(s, False, marks=pytest.mark.full) for s in (0, 3))],
)
def test_slurm_script_requeues_a_program_that_continues(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    text = files(Batch("slurm"))["train.sbatch"]
    ended = start(tmp_path, text, "sh", "--status", str(status), SLURM_JOB_ID="17")
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "requeue 17\n" * requeued
    assert not list(tmp_path.glob(".continues*"))


def test_ssh_script_starts_a_rank_on_each_host(tmp_path: Path) -> None:
    text = files("ssh", names=True)["hosts.sh"]
    ended = start(tmp_path, text, "bash", "me@gpu7", "gpu8", "gpu9", "--", "--note", "a b")
    assert ended.returncode == 0, ended.stderr
    for rank in range(3):
        variables, words = seen(tmp_path, rank)
        assert variables == [str(rank), "3", "gpu7", "29500"]
        assert words == ["--checkpoint", "checkpoints", "--note", "a b"]


def test_ssh_script_knows_the_hosts_of_the_cluster(tmp_path: Path) -> None:
    ended = start(tmp_path, files("ssh", names=True)["hosts.sh"], "bash")
    assert ended.returncode == 0, ended.stderr
    assert [seen(tmp_path, rank)[0][2] for rank in range(2)] == ["gpu0", "gpu0"]
    ended = start(tmp_path, files("ssh")["hosts.sh"], "bash")
    assert ended.returncode == 2
    assert "name the hosts" in ended.stderr


def test_ranks_on_other_hosts_have_the_variables_of_nbdist(tmp_path: Path) -> None:
    text = files("ssh")["hosts.sh"]
    ended = start(tmp_path, text, "bash", "a", "b", NBDIST_JOB="it's 1 job")
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"job{rank}").read_text() for rank in range(2)] == ["it's 1 job"] * 2
    ended = start(tmp_path, files(Batch("mpi"))["mpirun.sh"], "sh", NBDIST_JOB="1")
    assert ended.returncode == 0, ended.stderr
    assert " -x NBDIST_JOB " in (tmp_path / "words").read_text()


@pytest.mark.full  # end_to_end/test_submitted_jobs.py runs it
def test_local_script_runs_the_program_on_this_machine(tmp_path: Path) -> None:
    text = files("local")["run.sh"]
    ended = start(tmp_path, text, "sh", "--note", "a b", PYTHON=sys.executable)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        variables, words = seen(tmp_path, rank)
        assert variables[:2] == [str(rank), "2"]
        assert words == ["--checkpoint", "checkpoints", "--note", "a b"]


def test_ssh_script_ends_when_a_rank_fails(tmp_path: Path) -> None:
    ended = start(tmp_path, files("ssh")["hosts.sh"], "bash", "a", "b", "--", "--fail")
    assert ended.returncode == 3


SAVING = """
import os, signal, sys, time
rank = os.environ["RANK"]

def save(*_):
    open("saving", "w").close()
    time.sleep(0.5 + int(rank))
    open("saved" + rank, "w").close()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
open("up" + rank, "w").close()
while not (rank == "1" and os.path.exists("saving")):  # rank 0 notifies rank 1
    time.sleep(0.05)
save()
"""


def test_ssh_script_passes_sigterm_on_and_waits_for_all_ranks(tmp_path: Path) -> None:
    prepare(tmp_path, files("ssh")["hosts.sh"], SAVING)
    running = subprocess.Popen(
        ["bash", "script.sh", "a", "b"], cwd=tmp_path, env=with_doubles(tmp_path)
    )
    assert repeat_until(lambda: len(list(tmp_path.glob("up*"))) == 2, 30, 0.05)
    running.terminate()
    assert running.wait(30) == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_mpi_script_names_the_first_host(tmp_path: Path) -> None:
    text = files(Batch("mpi", options=("--mca a b",)))["mpirun.sh"]
    ended = start(tmp_path, text, "sh", "--epochs", "3")
    assert ended.returncode == 0, ended.stderr
    assert seen(tmp_path, "")[0][2:] == ["127.0.0.1", "29500"]
    (tmp_path / "hosts.txt").write_text("\nnode5 slots=1\nnode6 slots=1\n")
    ended = start(tmp_path, text, "sh", "--epochs", "3", HOSTFILE="hosts.txt")
    assert ended.returncode == 0, ended.stderr
    variables, words = seen(tmp_path, "")
    assert variables[2:] == ["node5", "29500"]
    assert words == ["--checkpoint", "checkpoints", "--epochs", "3"]
    given = (tmp_path / "words").read_text()
    assert given.startswith("-n 2 --hostfile hosts.txt --map-by node --mca a b -x MASTER_ADDR")


def test_kubernetes_objects_are_valid() -> None:
    batch = Batch("kubernetes", image="registry/train:1", gpus=2, time="1:00:00")
    found = files(batch, 4)
    service, job = yaml.safe_load_all(found["job.yaml"])
    for item in (service, job):
        kubernetes_validate.validate(item, VERSION, strict=True)
    spec = job["spec"]
    assert (spec["completions"], spec["activeDeadlineSeconds"]) == (4, 3600)
    (container,) = spec["template"]["spec"]["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert variables == {
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "my-train-0.my-train",
        "MASTER_PORT": "29500",
    }
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "my-train"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert found["Dockerfile"].startswith("FROM python:3.11-slim\n")


def test_a_jobset_restarts_all_ranks_together() -> None:
    batch = Batch("kubernetes", image="registry/train:1", gpus=2, time="1:00:00", kind="jobset")
    text = files(batch, 4)["job.yaml"]
    (jobset,) = yaml.safe_load_all(text)
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset  # no unknown field
    assert "needs JobSet" in text
    (group,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **group["template"]}
    kubernetes_validate.validate(job, VERSION, strict=True)
    spec = group["template"]["spec"]
    assert (spec["completions"], spec["backoffLimit"], group["replicas"]) == (4, 0, 1)
    assert address(spec) == "my-train-node-0-0.my-train"  # JobSet, group, replica, pod


def test_a_trainjob_has_its_own_runtime() -> None:
    batch = Batch("kubernetes", image="registry/train:1", kind="trainjob")
    text = files(batch, 4)["job.yaml"]
    runtime, job = yaml.safe_load_all(text)
    assert TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert "needs Kubeflow Trainer" in text
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"] == runtime["spec"]["mlPolicy"] == {"numNodes": 4}
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    assert address(spec) == "my-train-node-0-0.my-train"
    assert spec["template"]["spec"]["containers"][0]["name"] == group["name"] == "node"


def address(spec: dict[str, Any]) -> str:
    """Return the address of rank 0 in the specification of a Job."""
    (container,) = spec["template"]["spec"]["containers"]
    (found,) = (item["value"] for item in container["env"] if item["name"] == "MASTER_ADDR")
    return str(found)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch("lsf"), "no launch files for lsf: choose from local, ssh, slurm, mpi, kubernetes"),
        (Batch("kubernetes"), "needs --image"),
        (Batch("mpi", time="1:00:00"), "--time does not apply to --launcher mpi"),
        (Batch("slurm", image="x"), "--image does not apply to --launcher slurm"),
        (Batch("kubernetes", image="x", queue="y"), "--partition does not apply"),
        (Batch("slurm", time="2h"), "--time '2h': use the format 2:00:00"),
        (Batch("slurm", queue="a b"), "--partition 'a b': invalid characters"),
        (Batch("slurm", kind="jobset"), "--kind does not apply to --launcher slurm"),
    ],
)
def test_options_that_do_not_fit_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        files(batch)


def test_no_launcher_writes_no_files() -> None:
    assert files(None) == {}
