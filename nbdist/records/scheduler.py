"""Requests for hosts from a scheduler, and their connection to the notebook's machine."""

from __future__ import annotations

from nbdist.records.base import Launcher, Record


class Batch(Record, frozen=True):
    """A request for hosts from a scheduler.

    Attributes:
        launcher: name of the scheduler.
        queue: partition or queue; empty for the default one.
        time: time limit in the scheduler's format; empty for its default.
        gpus: GPUs of each host; 0 for no request.
        options: extra options for the scheduler.
        python: interpreter on the hosts; empty for the path of this machine's.
        listen: address of this machine for the hosts; empty for its own name.
        image: container image on Kubernetes.
        namespace: namespace on Kubernetes; empty for the configured one.
        pod: file with extra fields of the pod on Kubernetes; empty for none.
    """

    launcher: Launcher
    queue: str = ""
    time: str = ""
    gpus: int = 0
    options: tuple[str, ...] = ()
    python: str = ""
    listen: str = ""
    image: str = ""
    namespace: str = ""
    pod: str = ""


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
