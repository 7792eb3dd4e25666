"""What became of a cell that failed, as the one error that is raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster.collectives import RESTORED
from nbdist.errors import (
    CellError,
    LoneCollectiveError,
    PreemptedError,
    RanksLostError,
    UnsentError,
)
from nbdist.records import CellEnded, Failure
from nbdist.views import formatting
from nbdist.views.run.failures import follows, others

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from nbdist.records import StrategyName, Where


def cell_error(
    first: CellEnded,
    ended: Mapping[int, CellEnded],
    host_of: Mapping[int, str],
    broken: Collection[StrategyName],
) -> CellError | RanksLostError:
    """The error of the rank that failed first, with what became of the others.

    A rank that was not sent the cell as others were is as good as lost.

    Args:
        first: how that rank ended; it has a failure.
        ended: how each rank did that has.
        host_of: the host of each rank of the cell.
        broken: strategies whose collectives were broken off.
    """
    failure = first.failure
    assert failure is not None
    if failure.ename == UnsentError.__name__:
        return RanksLostError([first.rank], f"rank {first.rank}: {failure.evalue}")
    notes = others(first, ended, host_of.keys() - ended.keys())
    return CellError(
        rank=first.rank,
        host=host_of[first.rank],
        ename=failure.ename,
        evalue=failure.evalue,
        traceback=failure.traceback,
        notes=[*notes, *(RESTORED[strategy] for strategy in sorted(broken))],
    )


def lone_error(
    where: Mapping[int, Where],
    ended: Mapping[int, CellEnded],
    host_of: Mapping[int, str],
    broken: Collection[StrategyName],
) -> CellError | RanksLostError:
    """Of ranks that waited in a collective which the others cannot join.

    Args:
        where: those that waited.
        ended: how each rank ended that has.
        host_of: the host of each rank of the cell.
        broken: strategies whose collectives were broken off.
    """
    rank = min(where)
    gone = sorted(host_of.keys() - where.keys())
    have = "has" if len(gone) == 1 else "have"
    at = where[rank].place or "the end of the cell"
    failure = Failure(
        ename=LoneCollectiveError.__name__,
        evalue=f"it waits at {at} in a collective that rank {formatting.ranks(gone)}, which {have} "
        'ended the cell, cannot join: call it on all ranks, not under "if rank == 0"',
        traceback=tuple(where[rank].stack.splitlines()),
        same="",
    )
    lone = CellEnded(rank=rank, cell=where[rank].cell, status="error", seconds=0.0, failure=failure)
    return cell_error(lone, ended, host_of, broken)


def root(first: CellEnded | None, ended: Iterable[CellEnded]) -> CellEnded | None:
    """The failure that others followed, if one of them came first."""
    if first is None or not follows(first):
        return first
    return next((e for e in ended if e.status == "error" and not follows(e)), first)


def lost_error(
    dead: Sequence[int],
    host_of: Mapping[int, str],
    running: Collection[int],
    step: int,
    words: str,
    fate: str = "died",
) -> RanksLostError:
    """Of ranks that died in the cell.

    Args:
        dead: which.
        host_of: the host of each rank of the cell.
        running: those that are in it still, and heed nothing.
        step: the last one that the first of them began; 0 is none.
        words: the first one's last.
        fate: what became of it.
    """
    where = f"after step {step}" if step else "in the cell"
    hosts = {host_of[rank] for rank in dead}
    named = formatting.ranks(dead) + (f"@{hosts.pop()}" if len(hosts) == 1 else "")
    return RanksLostError(
        sorted({*dead, *running}),
        f"rank {named} {fate} {where}",
        ": type %dist_restart for new workers" + (f"\nrank {dead[0]}: {words}" if words else ""),
    )


def stuck_error(running: Collection[int], reason: str) -> RanksLostError:
    """Of a cell that was broken off for a reason, where those that are still in it heed nothing."""
    advice = f"\nrank {formatting.ranks(running)} is stuck: type %dist_restart" if running else ""
    return RanksLostError(sorted(running), reason, advice)


def preempted_error(
    ranks: Collection[int], name: str, after: str, *, saves: bool
) -> PreemptedError:
    """Of ranks that were told to end.

    Args:
        ranks: which.
        name: the first one's.
        after: which step, in words.
        saves: the run's state is saved.
    """
    advice = "--resume goes on from there" if saves else "nothing was to be saved"
    return PreemptedError(
        sorted(ranks),
        f"{name} was told to end (SIGTERM): the run was stopped {after}; {advice}. "
        "Type %dist_restart for new workers first",
    )
