"""What is particular to each scheduler that takes scripts: its words, and those of its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ipyparallel.cluster import launcher as launchers

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
"""Slurm's reasons for which a job waits for ever, unless somebody changes the cluster."""


@dataclass(frozen=True)
class Scheduler:
    """What is particular to one.

    Attributes:
        title: what people call a job of it.
        launcher: ipyparallel's.
        mark: with which lines for it begin in a script.
        template: of the script, as ipyparallel fills it in.
        queue, time, gpus: the words for each.
        look: the command that shows a job, after which its id comes.
        word: finds its state in what that prints; once for each part of it.
        waiting, over: states in which it has no hosts yet, or none any more.
        traits: of ipyparallel's launcher.
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
    traits: dict[str, Any]


_SHELL = "#!/bin/sh\n{options}\nexec {program_and_args}\n"
_SLURM = """\
#!/bin/sh
#SBATCH --job-name=nbdist
#SBATCH --nodes={n}
#SBATCH --ntasks-per-node=1
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output={output_file}
{options}
srun --kill-on-bad-exit=0 --wait=0 --no-kill --unbuffered {program_and_args}
"""
"""A host that is lost leaves the others; a job that is preempted is queued again."""

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


_ARRAY_ID = {"job_id_regexp": r"\d+(\[\])?"}

SCHEDULERS: dict[Launcher, Scheduler] = {
    "slurm": Scheduler(
        title="Slurm job",
        launcher=launchers.SlurmEngineSetLauncher,
        mark="#SBATCH ",
        template=_SLURM,
        queue="--partition={}",
        time="--time={}",
        gpus="--gpus-per-node={}",
        look=("scontrol", "show", "job", "--oneliner"),
        word=r"JobState=(\w+)",
        waiting=_words("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT"),
        over=_words(
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED "
            "REVOKED TIMEOUT"
        ),
        traits={},
    ),
    "pbs": Scheduler(
        title="PBS job",
        launcher=launchers.PBSEngineSetLauncher,
        mark="#PBS ",
        template=_SHELL,
        queue="-q {}",
        time="-l walltime={}",
        gpus="-l select=1:ngpus={}",
        look=("qstat", "-f"),
        word=r"job_state = (\w)",
        waiting=_words("Q H W T"),
        over=_words("C E F X"),
        traits=_ARRAY_ID,
    ),
    "sge": Scheduler(
        title="Grid Engine job",
        launcher=launchers.SGEEngineSetLauncher,
        mark="#$ ",
        template=_SHELL,
        queue="-q {}",
        time="-l h_rt={}",
        gpus="-l gpu={}",
        look=("qstat", "-s", "prs", "-j"),
        word=r"job_state\s+\d+:\s+(\w+)",
        waiting=_words("qw hqw Eqw"),
        over=frozenset(),
        traits={},
    ),
    "lsf": Scheduler(
        title="LSF job",
        launcher=launchers.LSFEngineSetLauncher,
        mark="#BSUB ",
        template=_SHELL,
        queue="-q {}",
        time="-W {}",
        gpus='-gpu "num={}"',
        look=("bjobs", "-noheader", "-o", "stat"),
        word=r"(?m)^(\w+)",
        waiting=_words("PEND PSUSP WAIT"),
        over=_words("DONE EXIT ZOMBI"),
        traits={},
    ),
    "htcondor": Scheduler(
        title="HTCondor job",
        launcher=launchers.HTCondorEngineSetLauncher,
        mark="",
        template=_CONDOR,
        queue="",
        time="+MaxRuntime = {}",
        gpus="request_gpus = {}",
        look=("condor_q", "-format", "%d\n", "JobStatus"),
        word=r"(?m)^(\d)",
        waiting=_words("1 5"),
        over=_words("3 4"),
        traits={},
    ),
}
"""Those that take scripts."""
