"""Errors that nbdist raises.

    NbdistError
    ├── UsageError              the request is invalid; nothing was started
    │   ├── RowKeyError             a result has no row with the key (also a KeyError)
    │   └── NoClusterError          a magic was used before %dist_start
    ├── StartError              a cluster or TensorBoard failed to start; nothing of it is left
    │   ├── VersionError            another version of nbdist started the cluster
    │   └── NoResponseError         a scheduler did not respond, or its answer is invalid
    ├── OwnedError              the kernel of another notebook owns the cluster
    ├── LeftError               a cell continues, and this process no longer follows it
    ├── TransferError           an object could not be pushed or pulled
    ├── WorkerError             a rank died, or cannot run a cell
    │   ├── RanksLostError          ranks died or hang in a cell
    │   ├── UnsentError             the notebook ended before it sent a cell to all ranks
    │   ├── LoneCollectiveError     a rank waits in a collective that other ranks cannot join
    │   ├── ClosedError             TensorFlow's collectives cannot be restored
    │   └── PreemptedError          a rank received SIGTERM, and the run stopped
    ├── ReplayError             the inputs of a run cannot be created again on a fresh worker
    ├── StepError               on a rank: a step cell cannot start or continue
    │   └── AnotherRankError        on a rank: it stopped because another rank did
    ├── StrategyError           a strategy does not fit the process, the workers or the data
    │   ├── KerasBackendError       Keras uses another backend than the cell needs
    │   └── LibraryVersionError     a feature does not support the version of a library
    ├── PlanError               no layout fits, or the requested one is not possible
    └── CellError               the user's cell raised an exception on a rank

`CellInterrupt` is a KeyboardInterrupt: an interrupt or Stop ended a cell.

Each message contains the failure, the value received and the remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class NbdistError(Exception):
    """Base class of all errors of nbdist."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message without the frames of nbdist."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(NbdistError):
    """An invalid request. Nothing was started or changed."""


class RowKeyError(UsageError, KeyError):
    """A key that no row of a result has."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoClusterError(UsageError):
    """A magic was used before a cluster was started."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} needs running workers, and none are running: run %dist_start 4 hosts"
        )


class StartError(NbdistError):
    """A failed start of a cluster or of TensorBoard. nbdist ended what it had started."""


class VersionError(StartError):
    """A cluster that another version of nbdist started.

    Attributes:
        started_by: the version that started the cluster as a phrase, for example "nbdist 0.1.9". It
            contains the format of the state if this version has another one.
        owner_pid: the process id of the running notebook kernel that owns the cluster; None
            without an owner.
    """

    def __init__(
        self, cluster: str, started_by: str, own: str, owner_pid: int | None = None
    ) -> None:
        self.started_by = started_by
        self.owner_pid = owner_pid
        super().__init__(
            f"cluster {cluster} was started by {started_by}, and this is {own}: "
            "attach with the version that started it, or end it with %dist_stop --all"
        )


class NoResponseError(StartError):
    """A command of a scheduler that did not respond, or whose answer is invalid.

    The scheduler may have executed it.
    """


class OwnedError(NbdistError):
    """A cluster that the kernel of another notebook owns.

    Attributes:
        pid: the process id of that kernel.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(
            f"the cluster belongs to another notebook, and its kernel (pid {pid}) is running: run "
            "%dist_stop there, or run %dist_start here for another cluster"
        )


class LeftError(NbdistError):
    """A cell that continues after this process has stopped following it."""

    def __init__(self) -> None:
        super().__init__(
            "the cell continues without this notebook: run %dist_attach in another one"
        )


class TransferError(NbdistError):
    """A failed copy of an object between the notebook and the workers."""


class WorkerError(NbdistError):
    """A rank that died or cannot run a cell."""


class RanksLostError(WorkerError):
    """Ranks that died or hang in a cell.

    Attributes:
        ranks: the lost ranks, also those that no longer respond.
        reason: the cause in one line.
    """

    def __init__(self, ranks: Sequence[int], reason: str, advice: str = "") -> None:
        self.ranks = tuple(ranks)
        self.reason = reason.partition("\n")[0]
        super().__init__(reason + advice)


class UnsentError(WorkerError):
    """A rank that did not receive a cell, because the notebook ended while it sent the cell."""


class LoneCollectiveError(WorkerError):
    """A collective that cannot end: other ranks have already ended the cell.

    The notebook raises a `CellError` with this name and its message.
    """


class ClosedError(WorkerError):
    """Cancelled TensorFlow collectives that cannot be restored in the same processes."""


class PreemptedError(WorkerError):
    """A run that stopped because a rank received SIGTERM, for example before a preemption.

    Attributes:
        ranks: the ranks that received the signal.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class ReplayError(NbdistError):
    """Inputs of a run that nbdist cannot create again on a fresh worker."""


class StepError(NbdistError):
    """A step cell that cannot start or continue with the names, data or values of a rank.

    The rank raises it. The notebook raises a `CellError` with the same message.
    """


class AnotherRankError(StepError):
    """A step cell that stopped on this rank because it failed on another rank.

    The error of the other rank contains the cause.
    """


class StrategyError(NbdistError):
    """A strategy that does not fit the process that creates it, the workers or the data."""


class KerasBackendError(StrategyError, ImportError):
    """A Keras backend other than the one that the cell requests or its strategy trains.

    It is also an ImportError: TensorFlow expects one if its own import of Keras fails.
    """


class LibraryVersionError(StrategyError):
    """An installed version of a library that a feature of nbdist does not support."""


class PlanError(NbdistError):
    """A step without a possible layout: too little memory, wrong constraints, unknown hardware."""


class CellError(NbdistError):
    """An exception that the user's cell raised on a rank.

    Attributes:
        rank: the first rank that raised.
        ename: the class name of the exception.
        evalue: the message of the exception.
        traceback: the formatted traceback. It starts at the user's cell and ends with the message.
        notes: lines about the other ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        host: str,
        ename: str,
        evalue: str,
        traceback: Sequence[str],
        notes: Sequence[str] = (),
    ) -> None:
        self.rank = rank
        self.host = host
        self.ename = ename
        self.evalue = evalue
        self.traceback = tuple(traceback)
        self.notes = tuple(notes)
        super().__init__("\n".join([f"{ename} on rank {rank}@{host}: {evalue}", *self.notes]))

    def with_note(self, note: str) -> CellError:
        """Return the error with another line."""
        return CellError(
            rank=self.rank,
            host=self.host,
            ename=self.ename,
            evalue=self.evalue,
            traceback=self.traceback,
            notes=(*self.notes, note),
        )

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message once, then the ranks."""
        if not self.traceback:
            return [str(self)]
        return [*self.traceback, "", f"raised on rank {self.rank}@{self.host}", *self.notes]


class CellInterrupt(KeyboardInterrupt):
    """A cell that an interrupt of the kernel or Stop has ended on all ranks."""

    def _render_traceback_(self) -> list[str]:
        """Return the line that IPython shows, in place of the frames of nbdist."""
        return [f"KeyboardInterrupt: {self}"]
