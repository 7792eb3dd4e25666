"""Hosts that a scheduler gives: how it is asked, and how they find the notebook's machine."""

from __future__ import annotations

from typing import Annotated

from nbdist.records.base import Launcher, Record
from nbdist.records.options import Option


class Batch(Record, frozen=True):
    """Request of hosts from a scheduler. Empty values leave the choice to the scheduler."""

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


class Calling(Record, frozen=True):
    """How a host calls this machine; whoever has it can run programs for the cluster's user.

    Attributes:
        address: this machine's.
        port: likewise, over TCP.
        key: private, by which the host is known (OpenSSH's format).
        trusted: public, of the only one who may give it orders.
        cluster: whose folders' names begin with it, after `nbdist-`.
        job: of which this is a part, by its number.
    """

    address: str
    port: int
    key: str
    trusted: str
    cluster: str
    job: int


class Caller(Record, frozen=True):
    """A host that has called.

    Attributes:
        job: of which it is a part, by its number.
        task: which part, from 0.
    """

    job: int
    task: int


class JobState(Record, frozen=True):
    """What the scheduler says of a job.

    Attributes:
        word: its own, in capitals as a rule; empty where it knows nothing of it.
        detail: the reason, or when it is to begin, as far as it says.
        waits: it has no hosts yet.
        over: it has none any more, and will have none.
        restarts: how often it was queued again.
    """

    word: str
    detail: str = ""
    waits: bool = False
    over: bool = False
    restarts: int = 0
