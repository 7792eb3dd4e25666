"""Options, commands and job states of each scheduler that accepts scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster import launcher as launchers

from nbdist.errors import StartError

if TYPE_CHECKING:
    from nbdist.records import Launcher

HOPELESS = {
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PartitionConfig",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
}
"""Slurm's reasons for which a job waits forever, unless an administrator changes the cluster."""


@dataclass(frozen=True)
class Scheduler:
    """Properties of a scheduler.

    Attributes:
        title: the display name of its jobs.
        launcher: ipyparallel's launcher class.
        mark: the prefix of the scheduler's lines in a script.
        template: the template of the script, which ipyparallel fills in.
        queue, time, gpus: the templates of its options; empty if not supported.
        look: the command that shows a job, with the fields `{id}` and `{user}`.
        word: the regular expression of a job's state in the output, one match for each part.
        waiting, over, hopeless: the states of a job that has no hosts yet, has ended, or will
            never get hosts.
        traits: the traits to set on ipyparallel's launcher.
        words: the readable names of states with short codes.
        is_silent_of_old: True if the command prints nothing about a job that has ended.
    """

    title: str
    launcher: type[launchers.BatchSystemLauncher]
    mark: str
    template: str
    queue: str
    time: str
    gpus: str
    look: tuple[str, ...]
    word: str
    waiting: frozenset[str]
    over: frozenset[str]
    traits: dict[str, Any] = field(default_factory=dict)
    hopeless: frozenset[str] = frozenset()
    words: dict[str, str] = field(default_factory=dict)
    is_silent_of_old: bool = False


_SHELL = "#!/bin/sh\n{options}\nexec {program_and_args}\n"
_SLURM = """\
#!/bin/sh
#SBATCH --job-name={name}
#SBATCH --nodes={n}
#SBATCH --ntasks-per-node=1
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output="{output_file}"
{options}
srun --kill-on-bad-exit=0 --wait=0 --no-kill --unbuffered {program_and_args}
"""
"""Script that survives the loss of a host, and that Slurm requeues after a preemption."""

_CONDOR = """\
universe = vanilla
executable = {program}
arguments = "{program_args} $(Process)"
transfer_executable = False
output = {output_file}
error = {output_file}
{options}
queue {n}
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SCHEDULERS: dict[Launcher, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm job",
        launcher=launchers.SlurmEngineSetLauncher,
        mark="#SBATCH ",
        template=_SLURM,
        queue="--partition={}",
        time="--time={}",
        gpus="--gpus-per-node={}",
        look=("scontrol", "show", "job", "--oneliner", "{id}"),
        word=r"JobState=(\w+)",
        waiting=_words("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT"),
        over=_words(
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED "
            "REVOKED TIMEOUT"
        ),
    ),
    "pbs": Scheduler(
        title="PBS job",
        launcher=launchers.PBSEngineSetLauncher,
        mark="#PBS ",
        template=_SHELL,
        queue="-q {}",
        time="-l walltime={}",
        gpus="-l select=1:ngpus={}",
        look=("qstat", "-f", "-t", "{id}"),
        word=r"job_state = ([A-Z])",
        waiting=_words("Q H W T"),
        over=_words("C E F X B"),  # B: an array, whose parts are listed too
        traits={"job_id_regexp": r"\d+(\[\])?"},
        words={"Q": "queued", "H": "held", "W": "waiting", "T": "moved", "R": "running"},
    ),
    "sge": Scheduler(
        title="Grid Engine job",
        launcher=launchers.SGEEngineSetLauncher,
        mark="#$ ",
        template=_SHELL,
        queue="-q {}",
        time="-l h_rt={}",
        gpus="-l gpu={}",
        look=("qstat", "-u", "{user}"),
        word=r"(?m)^\s*{id}\s+\S+\s+\S+\s+\S+\s+(\w+)",
        waiting=_words("qw hqw hRwq Rq"),
        over=_words("dr dt dRr"),
        hopeless=_words("Eqw Ehqw EhRqw"),
        is_silent_of_old=True,
    ),
    "lsf": Scheduler(
        title="LSF job",
        launcher=launchers.LSFEngineSetLauncher,
        mark="#BSUB ",
        template=_SHELL,
        queue="-q {}",
        time="-W {}",
        gpus='-gpu "num={}"',
        look=("bjobs", "-noheader", "-o", "stat", "{id}"),
        word=r"(?m)^(\w+)",
        waiting=_words("PEND PSUSP WAIT"),
        over=_words("DONE EXIT ZOMBI"),
    ),
    "htcondor": Scheduler(
        title="HTCondor job",
        launcher=launchers.HTCondorEngineSetLauncher,
        mark="",
        template=_CONDOR,
        queue="",
        time="",
        gpus="request_gpus = {}",
        look=("condor_q", "-format", "%d\n", "JobStatus", "{id}"),
        word=r"(?m)^(\d)",
        waiting=_words("1"),
        over=_words("3 4"),
        hopeless=_words("5"),
        words={"1": "idle", "2": "running", "3": "removed", "4": "completed", "5": "held"},
        is_silent_of_old=True,
    ),
}
"""Schedulers that accept scripts, by launcher."""

_WHOLE = 4
"""Number of fields in days, hours, minutes and seconds."""


def seconds(time: str) -> int:
    """Convert Slurm's format of a time to seconds.

    Args:
        time: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`.

    Raises:
        StartError: the time has another format.
    """
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) if part.isdecimal() else -1 for part in (days or "0", *rest.split(":"))]
    units = (86400, 3600, 60, 1) if dash or len(numbers) == _WHOLE else (86400, 60, 1)
    if min(numbers) < 0 or len(numbers) > len(units):
        raise StartError(f"--time {time}: use the format 2:00:00")
    return sum(number * unit for number, unit in zip(numbers, units, strict=False))
