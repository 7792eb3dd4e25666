"""Requests for hosts from a scheduler, and their connection to the notebook's machine."""

from __future__ import annotations

from typing import Annotated, Literal

from nbdist.records.base import Launcher, Record
from nbdist.records.options import Option


class Batch(Record, frozen=True):
    """Request of hosts from a scheduler. Empty values leave the choice to the scheduler.

    Attributes:
        launcher: `slurm`, `pbs`, `sge`, `lsf`, `htcondor`, `mpi` or `kubernetes`.
        queue: partition or queue. Not for `htcondor`, `mpi` and `kubernetes`.
        time: time limit of the job, such as `2:00:00` for 2 hours. nbdist converts it to minutes
            for `lsf` and to seconds for `kubernetes`. Not for `htcondor` and `mpi`.
        gpus: number of GPUs of each host, at most 1024; 0 requests none. Not for `mpi`.
        options: further options, one text for each line of the scheduler's script. For `mpi`, they
            are options of `mpiexec`. Not for `kubernetes`.
        python: path of Python on the hosts; empty for that of this process, and for `python` under
            `kubernetes`.
        listen: address of this machine to which the hosts connect; empty if nbdist chooses it.
        image: image of the containers. Required for `kubernetes`, and only for it.
        namespace: namespace for `kubernetes`; empty for that of its configuration.
        pod: path of a YAML file with further fields of the pods for `kubernetes`.
        kind: Kubernetes object that starts an exported program: an Indexed Job, a JobSet, or a
            TrainJob of Kubeflow Trainer. Only `job` for clusters.
    """

    launcher: Annotated[
        Launcher,
        Option(
            default="none",
            help="Scheduler that provides the hosts.",
            details="See [clusters](clusters.md).",
        ),
    ]
    queue: Annotated[
        str,
        Option(
            flags=("--partition", "--queue"),
            metavar="NAME",
            default="the scheduler's",
            help="Partition or queue of the scheduler.",
        ),
    ] = ""
    time: Annotated[
        str,
        Option(metavar="H:M:S", default="the scheduler's", help="Time for which hosts are needed."),
    ] = ""
    gpus: Annotated[
        int,
        Option(
            flags=("--gpus-per-host",),
            metavar="K",
            least=0,
            most=1024,
            default="none requested",
            help="GPUs of each host.",
        ),
    ] = 0
    options: Annotated[
        tuple[str, ...],
        Option(
            flags=("--submit", "--sbatch"),
            kind="list",
            metavar="WORDS",
            help='Further options for the scheduler, as in "--account=x".',
            details="Can be repeated.",
        ),
    ] = ()
    python: Annotated[
        str,
        Option(
            metavar="PATH",
            default="the path of the notebook's",
            help="Python program on other hosts.",
        ),
    ] = ""
    listen: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            default="found by nbdist",
            help="Address of this machine to which hosts of a scheduler connect.",
        ),
    ] = ""
    image: Annotated[str, Option(metavar="NAME", help="Image of the containers in Kubernetes.")] = (
        ""
    )
    namespace: Annotated[
        str,
        Option(
            metavar="NAME",
            default="from its configuration",
            help="Namespace in Kubernetes.",
        ),
    ] = ""
    pod: Annotated[
        str, Option(metavar="FILE", help="File with further fields of the pods in Kubernetes.")
    ] = ""
    kind: Annotated[
        Literal["job", "jobset", "trainjob"],
        Option(help="Kubernetes object that starts the program."),
    ] = "job"


class DialInTicket(Record, frozen=True):
    """Secret ticket of a host for its connection to this machine.

    The holder can run programs as the user of the cluster.

    Attributes:
        address: address of this machine.
        port: TCP port of this machine.
        key: private key of the host, in OpenSSH's format.
        trusted: public key of the only client that may send commands.
        cluster: cluster id, part of the folder names `nbdist-ID...`.
        job: number of the job.
    """

    address: str
    port: int
    key: str
    trusted: str
    cluster: str
    job: int


class DialedHost(Record, frozen=True):
    """A host that connected to this machine.

    Attributes:
        job: number of its job.
        task: index of the task in the job, from 0.
    """

    job: int
    task: int


class JobState(Record, frozen=True):
    """State of a job, from the scheduler.

    Attributes:
        word: the scheduler's name of the state; empty if it does not know the job.
        detail: reason, or expected start, if the scheduler reports it.
        waits: the job has no hosts yet.
        over: the job has ended.
        restarts: number of requeues.
    """

    word: str
    detail: str = ""
    waits: bool = False
    over: bool = False
    restarts: int = 0
