"""What is looked at before a run, and what was found."""

from __future__ import annotations

import msgspec

from nbdist.records.base import Record


class Gpu(Record, frozen=True):
    """An NVIDIA GPU as its driver tells of it; `busy` is a share of the last second."""

    name: str
    memory_bytes: int
    used_bytes: int
    busy: float


class HostFacts(Record, frozen=True):
    """What a rank's host is, and has to spare.

    Attributes:
        rank: who looked.
        host: the name that it has for itself.
        python: the program.
        versions: of Python and of packages that are installed.
        folder: where the rank works.
        cpus: cores that it may use.
        free_bytes: of memory, for programs that begin now.
        disk_bytes: free, where it works.
        shm_bytes: free, in memory that processes share.
        gpus: all of the host.
        driver: of these; empty where there are none.
        time_s: its clock, since 1970.
    """

    rank: int
    host: str
    python: str
    versions: dict[str, str]
    folder: str
    cpus: int
    free_bytes: int
    disk_bytes: int
    shm_bytes: int
    gpus: tuple[Gpu, ...]
    driver: str
    time_s: float


class Reach(Record, frozen=True):
    """How one rank reaches another.

    Attributes:
        rank: whom.
        fault: why it does not; empty where it does.
        latency_s: there and back, the shortest; 0 where it was not measured.
        bytes_per_s: one way; 0 where it was not measured.
    """

    rank: int
    fault: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class Trouble(Record, frozen=True):
    """Something that was found.

    Attributes:
        where: the hosts.
        what: is wrong, with its figures.
        advice: what to type, or to do.
        is_fatal: a run would fail, or never begin.
    """

    where: str
    what: str
    advice: str
    is_fatal: bool = False


class Examination(Record, frozen=True):
    """What was looked at, and found.

    Attributes:
        facts: of each rank, in their order.
        reaches: how each rank reaches the others, by rank.
        skew_s: by how much its clock is ahead of this machine's, by rank.
        skew_error_s: how well that is known.
        troubles: what was found; fatal ones first.
        seconds: it took.
    """

    facts: tuple[HostFacts, ...]
    reaches: dict[int, tuple[Reach, ...]] = msgspec.field(default_factory=dict)
    skew_s: dict[int, float] = msgspec.field(default_factory=dict)
    skew_error_s: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    seconds: float = 0.0
