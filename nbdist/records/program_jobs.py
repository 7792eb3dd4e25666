"""Submitted programs."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.records.base import Record
from nbdist.records.runs import Writer
from nbdist.records.scheduler import Batch

ProgramLauncher = Literal["local", "ssh", "slurm", "mpi"]
"""Launchers that `%dist_submit` starts."""

ProgramLaunch = Batch | Literal["ssh", "local"]
"""Launcher of an exported program: a scheduler with its options, ssh, or this machine."""

ProgramStatus = Literal["queued", "running", "finished", "stopped", "failed", "unknown"]
"""Status of a submitted program. `stopped`: cancelled, or ended by SIGTERM."""


class ProgramJob(Record, frozen=True):
    """Content of `job.json` in the folder of a submitted program.

    Attributes:
        id: id of the job, which its runs contain.
        launcher: the launcher.
        number: Slurm's number of the job; empty under other launchers.
        process: process on this machine that started the program; None under Slurm.
        submitted: time of the first start in seconds since 1970.
        runs: folder of its runs.
        arguments: arguments of the program.
        variables: environment variables beside those of the notebook.
    """

    id: str
    launcher: ProgramLauncher
    number: str
    process: Writer | None
    submitted: float
    runs: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = msgspec.field(default_factory=dict)
