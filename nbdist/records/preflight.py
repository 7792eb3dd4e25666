"""Checks of hosts and networks before a run, and their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records.base import Record, ResultRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Gpu(Record, frozen=True):
    """An NVIDIA GPU, from its driver. `busy` is the utilisation of the last second, from 0 to 1."""

    name: str
    memory_bytes: int
    used_bytes: int
    busy: float


class HostFacts(Record, frozen=True):
    """A rank's host and its free resources.

    Attributes:
        rank: reporting rank.
        host: own name of the host.
        python: path of the interpreter.
        versions: versions of Python and of installed packages.
        folder: working directory.
        cpus: cores that the rank may use.
        free_bytes: memory available to new programs.
        disk_bytes: free disk space in the working directory.
        shm_bytes: free shared memory.
        gpus: all GPUs of the host.
        driver: version of the GPU driver; empty without GPUs.
        time_s: clock of the host, in seconds since 1970.
        choices: settings that nbdist chose for the process of the rank, with the reasons.
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
    choices: tuple[str, ...] = ()


class Reach(Record, frozen=True):
    """Connection from one rank to another.

    Attributes:
        rank: the other rank.
        fault: reason of a failure; empty if the connection works.
        latency_s: shortest round trip; 0 if not measured.
        bytes_per_s: bandwidth of one direction; 0 if not measured.
    """

    rank: int
    fault: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


class Trouble(ResultRow, frozen=True):
    """A problem.

    Attributes:
        where: its hosts.
        what: description with figures.
        advice: remedy.
        is_fatal: a run would fail or never start.
    """

    where: str
    what: str
    advice: str
    is_fatal: bool = False


def bandwidths(reaches: Mapping[int, Sequence[Reach]]) -> dict[tuple[int, int], float]:
    """Return the measured bandwidths in bytes per second, by sender and receiver.

    Args:
        reaches: connections to the other ranks, by rank.
    """
    return {
        (rank, one.rank): one.bytes_per_s
        for rank, reached in sorted(reaches.items())
        for one in reached
        if one.bytes_per_s
    }


class Examination(Record, frozen=True):
    """Results of the checks.

    Attributes:
        facts: hosts, in the order of ranks.
        reaches: connections to the other ranks, by rank.
        skew_s: lead of the clock over this machine's, by rank.
        skew_error_s: uncertainty of `skew_s`.
        troubles: problems, fatal ones first.
        seconds: duration of the checks.
    """

    facts: tuple[HostFacts, ...]
    reaches: dict[int, tuple[Reach, ...]] = msgspec.field(default_factory=dict)
    skew_s: dict[int, float] = msgspec.field(default_factory=dict)
    skew_error_s: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    seconds: float = 0.0
