"""Hosts that a scheduler gives: how it is asked, and how they find the notebook's machine."""

from __future__ import annotations

from nbdist.records.base import Launcher, Record


class Batch(Record, frozen=True):
    """How a scheduler is asked for hosts.

    Attributes:
        launcher: which.
        queue: its partition or queue; empty for the default one.
        time: how long the hosts are needed, in the scheduler's words; empty for its default.
        gpus: of each host; 0 does not ask for any.
        options: further words for it, an option each.
        python: the program on the hosts; empty for the one at the same path as here.
        listen: the address of this machine that hosts connect to; empty for its own.
        image: of Kubernetes' containers.
        namespace: Kubernetes'; empty for the one that its configuration has.
        pod: a file with what Kubernetes' pods have beside; empty for none.
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


class DialedHost(Record, frozen=True):
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
