"""Every error that nbdist raises.

    NbdistError
    ├── UsageError          what was typed cannot be done; nothing was started
    ├── NoClusterError      a cell or a question came before %dist_start
    ├── StartError          a cluster could not be started, or TensorBoard; what was started is gone
    ├── OwnedError          a cluster is another notebook's
    ├── LeftError           a cell goes on, and this process does not follow it any more
    ├── TransferError       an object could not be pushed or pulled
    ├── WorkerError         a rank died, or can take no cell
    │   ├── RanksLostError      ranks died, or stand still, in a cell
    │   └── PreemptedError      a rank was told to end (SIGTERM), and the run stopped
    ├── ReplayError         what a run uses cannot be made again on a fresh worker
    ├── StepError           on a rank: a step cell cannot be run, or go on, with what is there
    │   └── AnotherRankError    on a rank: it stopped for the sake of another
    ├── StrategyError       a strategy does not fit the place, the processes or the data
    │   └── KerasBackendError   Keras has another backend than a cell asks for or needs
    ├── PlanError           no layout fits, or what was asked of one is not possible
    └── CellError           the user's cell raised on a rank

Each says what happened, with the value, and what to type next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class NbdistError(Exception):
    """The root of the tree."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines: the message, not the frames of this library."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(NbdistError):
    """What was typed cannot be done. Nothing was started or changed."""


class NoClusterError(UsageError):
    """A magic was used before a cluster was started."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} needs running workers, and there are none: type %dist_start 4 hosts"
        )


class StartError(NbdistError):
    """A cluster, or TensorBoard, could not be started. What had been started was ended again."""


class VersionError(StartError):
    """Another version of nbdist started the cluster.

    Attributes:
        cluster: its id.
        started_by: version of nbdist that started the cluster; empty before 0.2.0.
    """

    def __init__(self, cluster: str, started_by: str, own: str) -> None:
        self.cluster, self.started_by = cluster, started_by
        theirs = started_by or "a version before 0.2.0"
        super().__init__(
            f"cluster {cluster} was started by nbdist {theirs}, and this is nbdist {own}: attach "
            "with the version that started it, or end it with %dist_stop --all"
        )


class OwnedError(NbdistError):
    """A cluster cannot be taken over, as the kernel of another notebook has it.

    Attributes:
        pid: the kernel's.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(
            f"the cluster belongs to a notebook whose kernel (pid {pid}) runs: type %dist_stop "
            "there, or %dist_start here for another one"
        )


class LeftError(NbdistError):
    """A cell goes on without the process that followed it."""

    def __init__(self) -> None:
        super().__init__("the cell goes on without this notebook: type %dist_attach in another one")


class TransferError(NbdistError):
    """An object could not be moved between the notebook and the workers."""


class WorkerError(NbdistError):
    """A rank died or can take no cell."""


class RanksLostError(WorkerError):
    """Ranks died in a cell, or do nothing any more.

    Attributes:
        ranks: which; others may have to be taken for lost, too, as they heed nothing.
        reason: what became of them, in a line.
    """

    def __init__(self, ranks: Sequence[int], reason: str, advice: str = "") -> None:
        self.ranks = tuple(ranks)
        self.reason = reason.partition("\n")[0]
        super().__init__(reason + advice)


class UnsentError(WorkerError):
    """A rank was not sent a cell that others were: the notebook was gone by then."""


class LoneCollectiveError(WorkerError):
    """A rank waits in a collective that a rank which has ended the cell cannot join.

    The notebook raises a `CellError` with this name and its message.
    """


class ClosedError(WorkerError):
    """TensorFlow's collectives were cancelled and cannot be restored in the same processes."""


class PreemptedError(WorkerError):
    """A rank's process was told to end, as before its machine is taken away: the run stopped.

    Attributes:
        ranks: which.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class ReplayError(NbdistError):
    """What a run uses cannot be made again on a fresh worker."""


class StepError(NbdistError):
    """A step cell cannot be run, or go on, with the names, data or values that a rank has.

    Raised on the rank; the notebook sees a `CellError` with its message.
    """


class AnotherRankError(StepError):
    """A step cell stopped on this rank because of what another one met, which tells it better."""


class StrategyError(NbdistError):
    """A strategy does not fit where it is made, the processes there are, or its data."""


class KerasBackendError(StrategyError, ImportError):
    """Keras is, or would be, on another backend than the cell asks for or its strategy trains.

    It is an ImportError, which TensorFlow expects when it imports Keras as a part of itself.
    """


class PlanError(NbdistError):
    """No layout fits, or what was asked of one is not possible, or of hardware nobody knows."""


class CellError(NbdistError):
    """The user's cell raised on a rank.

    Attributes:
        rank: the first rank that raised.
        ename: the name of the exception's class there.
        evalue: its message.
        traceback: the formatted traceback, cut to the frames from the user's cell on.
        notes: one line each about the other ranks.
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

    def _render_traceback_(self) -> list[str]:
        return [*self.traceback, "", str(self)] if self.traceback else [str(self)]
