"""Outcome of a cell: the ends of its ranks, and one error for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster.collectives import RESTORED
from nbdist.errors import (
    AnotherRankError,
    CellError,
    CellInterrupt,
    LoneCollectiveError,
    PreemptedError,
    RanksLostError,
    UnsentError,
)
from nbdist.records import CellEnded, Failure
from nbdist.utils.error_text import described
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from nbdist.records import RankPosition, RunStatus, StrategyName


class CellOutcome:
    """Ends of the ranks, and the end of the cell.

    Args:
        host_of: the host of each rank that runs the cell.

    Attributes:
        ended: the end of each rank that has ended the cell.
        preempted: the ranks that received SIGTERM.
        failed: the end of the rank whose error is the error of the cell; None without an error.
    """

    def __init__(self, host_of: Mapping[int, str]) -> None:
        self.ended: dict[int, CellEnded] = {}
        self.preempted: set[int] = set()
        self.failed: CellEnded | None = None
        self._host_of = host_of
        self._status: RunStatus = "finished"
        self._error = ""

    def first_failure(self, *, interrupted: bool) -> CellEnded | None:
        """Return the first failure.

        Args:
            interrupted: True if nbdist has interrupted the ranks. Otherwise the cell itself raised
                `KeyboardInterrupt`, and this is a failure too.
        """
        failed = ("error",) if interrupted else ("error", "interrupted")
        return next((e for e in self.ended.values() if e.status in failed), None)

    def fail(self, error: Exception) -> None:
        """Set the error of the cell. It replaces the error of a rank."""
        self._status, self._error, self.failed = "failed", str(error), None

    def stop(self, *, requested: bool = True) -> None:
        """Set the status of a cell that a browser's request or an interrupt has ended.

        Args:
            requested: True for a request, False for an interrupt.
        """
        self._status, self._error = "stopped" if requested else "interrupted", ""

    def summary(self) -> tuple[RunStatus, str]:
        """Return the status of the run, and its error, whose first line is a summary."""
        if self.failed is None or self.failed.failure is None:
            return self._status, self._error
        failure = self.failed.failure
        who = f"{failure.ename} on {self.name(self.failed.rank)}"
        return "failed", described(who, failure.evalue)

    def is_consequence(self) -> bool:
        """Return True if the error of the cell follows the failure of another rank."""
        return self.failed is not None and _follows(self.failed)

    def name(self, rank: int) -> str:
        """Return the label of a rank for messages."""
        return f"rank {rank}@{self._host_of[rank]}"


def cell_error(
    first: CellEnded,
    ended: Mapping[int, CellEnded],
    host_of: Mapping[int, str],
    broken: Collection[StrategyName],
) -> CellError | RanksLostError:
    """Return the error of the rank that failed first, with notes on the other ranks.

    A rank that did not receive the cell counts as lost.

    Args:
        first: the end of that rank, with a failure.
        ended: the ends of the ranks.
        host_of: the host of each rank of the cell.
        broken: the strategies whose collectives were cancelled.
    """
    failure = first.failure
    assert failure is not None
    if failure.ename == UnsentError.__name__:
        return RanksLostError([first.rank], f"rank {first.rank}: {failure.evalue}")
    notes = _others(first, ended, host_of.keys() - ended.keys())
    return CellError(
        rank=first.rank,
        host=host_of[first.rank],
        ename=failure.ename,
        evalue=failure.evalue,
        traceback=failure.traceback,
        notes=[*notes, *(RESTORED[strategy] for strategy in sorted(broken))],
    )


def lone_collective_error(
    where: Mapping[int, RankPosition],
    ended: Mapping[int, CellEnded],
    host_of: Mapping[int, str],
    broken: Collection[StrategyName],
) -> CellError | RanksLostError:
    """Return the error of ranks that waited in a collective that the others cannot join.

    Args:
        where: the positions of the ranks that waited.
        ended: the ends of the ranks.
        host_of: the host of each rank of the cell.
        broken: the strategies whose collectives were cancelled.
    """
    rank = min(where)
    gone = sorted(host_of.keys() - where.keys())
    have = "has" if len(gone) == 1 else "have"
    at = where[rank].place or "the end of the cell"
    text = (
        f"waits at {at} in a collective, but rank {formatting.ranks(gone)} {have} ended the cell "
        'and cannot join: call the collective on all ranks, not under "if rank == 0"'
    )
    name, stack = LoneCollectiveError.__name__, where[rank].stack.splitlines()
    traceback = (*stack, "", f"{name}: {text}") if stack else ()
    failure = Failure(ename=name, evalue=text, traceback=traceback, same="")
    lone = CellEnded(rank=rank, cell=where[rank].cell, status="error", seconds=0.0, failure=failure)
    return cell_error(lone, ended, host_of, broken)


def root(first: CellEnded | None, ended: Iterable[CellEnded]) -> CellEnded | None:
    """Return the failure that caused the others, if `first` is a consequence of another one."""
    if first is None or not _follows(first):
        return first
    return next((e for e in ended if e.status == "error" and not _follows(e)), first)


def lost_error(
    dead: Sequence[int],
    host_of: Mapping[int, str],
    running: Collection[int],
    step: int,
    words: str,
    end_verb: str = "died",
) -> RanksLostError:
    """Return the error of ranks that died in the cell.

    Args:
        dead: the dead ranks.
        host_of: the host of each rank of the cell.
        running: the ranks that still run the cell and do not respond.
        step: the last step that the first dead rank began; 0 for none.
        words: the last output of the first dead rank.
        end_verb: the verb for its end, such as "died".
    """
    where = f"after step {step}" if step else "in the cell"
    hosts = {host_of[rank] for rank in dead}
    named = formatting.ranks(dead) + (f"@{hosts.pop()}" if len(hosts) == 1 else "")
    return RanksLostError(
        sorted({*dead, *running}),
        f"rank {named} {end_verb} {where}",
        ": run %dist_restart for new workers" + (f"\nrank {dead[0]}: {words}" if words else ""),
    )


def stuck_error(running: Collection[int], reason: str) -> RanksLostError:
    """Return the error of a cancelled cell. Ranks that still run it do not respond."""
    advice = f"\nrank {formatting.ranks(running)} is stuck: run %dist_restart" if running else ""
    return RanksLostError(sorted(running), reason, advice)


def interrupt(
    ended: Collection[CellEnded], step: int, killed: Collection[int], *, forced: bool, saves: bool
) -> CellInterrupt:
    """Return the interrupt that ended a cell: where it stopped, and what is left of its state.

    Args:
        ended: the ends of the ranks.
        step: the last step that a rank began; 0 for none.
        killed: the ranks that nbdist kills, because they do not respond.
        forced: True if nbdist has cancelled the step.
        saves: True if the run has a checkpoint.
    """
    if step:
        where = f" in step {step:,}" if forced else f" after step {step:,}"
    else:
        failures = (end.failure for end in ended if end.failure is not None)
        where = next((f" at {line}" for failed in failures for line in failed.traceback[:1]), "")
    left = "the workers keep their variables"
    if killed:
        left = "all workers restart without their variables"
    if saves:
        left += ", and --resume continues the run"
    return CellInterrupt(f"stopped{where}; {left}")


def preempted_error(
    ranks: Collection[int], name: str, after: str, *, saves: bool
) -> PreemptedError:
    """Return the error of ranks that received SIGTERM.

    Args:
        ranks: the ranks.
        name: the label of the first one.
        after: the last step in words, such as "after step 3".
        saves: True if the run has a checkpoint.
    """
    advice = "use --resume to continue from there" if saves else "it has no --checkpoint"
    return PreemptedError(
        sorted(ranks),
        f"{name} received SIGTERM: the run stopped {after}; {advice}. "
        "Run %dist_restart for new workers first",
    )


def _others(first: CellEnded, ended: Mapping[int, CellEnded], stuck: Collection[int]) -> list[str]:
    """Return one line for each kind of end of the other ranks.

    Args:
        first: the failure that is shown.
        ended: all ends, by rank.
        stuck: the ranks that have not ended.
    """
    kinds: dict[str, list[int]] = {}
    for rank, end in ended.items():
        if rank != first.rank:
            kinds.setdefault(_words(end, first), []).append(rank)
    if stuck:
        kinds["still running, perhaps in a collective: run %dist_restart"] = list(stuck)
    return [f"rank {formatting.ranks(ranks)}: {kind}" for kind, ranks in kinds.items()]


def _follows(ended: CellEnded) -> bool:
    """Return True if the rank failed because another rank had failed."""
    return ended.failure is not None and ended.failure.follows


def _words(ended: CellEnded, first: CellEnded) -> str:
    if ended.failure is None or ended.status == "interrupted":
        return "stopped" if ended.status == "interrupted" else "finished"
    assert first.failure is not None
    if ended.failure.ename == AnotherRankError.__name__:
        return "stopped because of it"
    if ended.failure.ename == UnsentError.__name__:
        return ended.failure.evalue
    if ended.failure.follows and first.failure.ename == LoneCollectiveError.__name__:
        return "also waited in the cancelled collective"
    if ended.failure.follows:
        return "waited for it in a collective that nbdist cancelled"
    if ended.failure.same == first.failure.same:
        return "the same error"
    return described(ended.failure.ename, ended.failure.evalue).partition("\n")[0]


def hang(where: Mapping[int, RankPosition], host_of: Mapping[int, str]) -> str:
    """Describe a hang: the positions of ranks, the ranks that wait, and those without a response.

    Args:
        where: the positions of the ranks that responded.
        host_of: the host of each rank that still runs the cell.

    Returns:
        One line, then the stacks of the ranks.
    """
    waiting = sorted(rank for rank, one in where.items() if one.waits)
    elsewhere = sorted(where.keys() - waiting)
    silent = sorted(host_of.keys() - where.keys())
    words = [f"rank {rank}@{host_of[rank]} is at {_at(where[rank])}" for rank in elsewhere]
    words += [f"rank {rank}@{host_of[rank]} does not respond" for rank in silent]
    if waiting:
        others = "the others wait" if words else "all ranks wait"
        steps = sorted({where[rank].step for rank in waiting})
        words.append(f"{others} in a collective of step {formatting.ranks(steps)}")
    stacks: dict[str, list[int]] = {}
    for rank, one in where.items():
        stacks.setdefault(one.stack, []).append(rank)
    texts = (
        f"rank {formatting.ranks(ranks)}:\n{stack}" for stack, ranks in stacks.items() if stack
    )
    return "\n".join(["; ".join(words), *texts])


def _at(where: RankPosition) -> str:
    return ", ".join(filter(None, (where.place, f"step {where.step}" if where.step else "")))
