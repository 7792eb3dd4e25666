"""Doubles of workers and sinks, for cells without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import WorkerError
from nbdist.execution.live_run import NullRun
from nbdist.execution.sending import CellSender
from nbdist.records import (
    CellEnded,
    CellOptions,
    CellRequest,
    Command,
    Failure,
    RankPosition,
    Saving,
)
from nbdist.views.run.cell_output import SilentView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.records import RecoveryRecord, RunStatus, StrategyName

CELL = 7


class DispatcherDouble:
    """Double of the dispatcher: it stores commands, and passes them to a simulated rank."""

    def __init__(self) -> None:
        self.sent: list[tuple[Command, tuple[int, ...]]] = []
        self.unreachable: set[int] = set()
        self.deliver: Callable[[Command, int], None] = lambda command, rank: None

    def send(self, command: Command, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.unreachable:
                raise WorkerError(f"rank {rank} cannot be reached")
            self.sent.append((command, (rank,)))
            self.deliver(command, rank)

    def of(self, kind: type[Command]) -> list[tuple[Any, int]]:
        """Return the commands of a type, each with its rank."""
        return [(command, rank) for command, (rank,) in self.sent if isinstance(command, kind)]

    def ranks(self, kind: type[Command]) -> list[int]:
        """Return the receivers of the commands of a type."""
        return [rank for _, rank in self.of(kind)]


class EnginesDouble:
    """Double of the engines: processes that die, freeze or respond to interrupts as told."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.frozen: set[int] = set()
        self.unreachable: set[int] = set()
        self.interrupts: list[list[int]] = []
        self.on_interrupt: Callable[[Sequence[int]], None] = lambda ranks: None
        self.is_requested = False

    def dead(self) -> list[int]:
        return list(self.lost)

    def interrupt(self, ranks: Sequence[int]) -> None:
        self.interrupts.append(list(ranks))
        self.on_interrupt(ranks)

    def is_unreachable(self, rank: int) -> bool:
        return rank in self.unreachable

    def is_frozen(self, rank: int) -> bool:
        return rank in self.frozen

    def describe_end(self, rank: int, lines: int) -> str:
        return f"last {lines} lines of {rank}"

    def describe_loss(self, rank: int) -> str:
        return "was killed"

    def describe_silence(self, rank: int) -> str:
        return f"{rank} may compute"


class ViewDouble(SilentView):
    """Double of the view: it stores messages and records."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.shown: list[object] = []

    def add(self, record: object) -> None:
        self.shown.append(record)

    def show_message(self, line: str) -> None:
        self.messages.append(line)

    def recovering(self, reason: str) -> None:
        self.messages.append(f"recovering: {reason}")

    def recovered(self, recovery: RecoveryRecord) -> None:
        self.shown.append(recovery)


class LiveDouble(NullRun):
    """Double of a stored run: it counts the stop requests of browsers."""

    def __init__(self) -> None:
        super().__init__("not stored")
        self.requests = 0
        self.calls: list[tuple[str, object]] = []

    def stops_requested(self) -> int:
        return self.requests

    def stopping(self, *, requested: bool = True) -> None:
        self.calls.append(("stopping", None))

    def lost(self, ranks: Iterable[int]) -> None:
        self.calls.append(("lost", list(ranks)))

    def recovering(self, reason: str) -> None:
        self.calls.append(("recovering", reason))

    def recovered(self, recovery: RecoveryRecord, pids: object) -> None:
        self.calls.append(("recovered", (recovery, pids)))

    def leave(self) -> None:
        self.calls.append(("leave", None))

    def end(self, status: RunStatus, error: str = "") -> tuple[str, ...]:
        self.calls.append(("end", (status, error)))
        return ()


def sender_to(ranks: Iterable[int], dispatcher: DispatcherDouble) -> CellSender:
    """Return a sender whose cell these ranks run."""
    sender = CellSender(CELL, dispatcher)  # type: ignore[arg-type]
    sender.running.update(ranks)
    return sender


def request(
    source: str = "",
    strategy: StrategyName | None = None,
    *,
    saving: Saving | None = None,
    **fields: Any,
) -> CellRequest:
    options = CellOptions(saving=saving)
    given: dict[str, Any] = {
        "number": CELL,
        "source": source,
        "label": 3,
        "strategy": strategy,
        "awaits": False,
        "options": options,
    }
    return CellRequest(**(given | fields))


def ended(rank: int, status: str = "ok", failure: Failure | None = None, **more: Any) -> CellEnded:
    fields: dict[str, Any] = {"rank": rank, "cell": CELL, "status": status, "seconds": 1.0}
    return CellEnded(**fields, failure=failure, **more)


def failure(
    ename: str = "ValueError", evalue: str = "bad", same: str = "a", *, follows: bool = False
) -> Failure:
    return Failure(
        ename=ename, evalue=evalue, traceback=("line 1",), same=f"{ename}{same}", follows=follows
    )


def where(rank: int, **fields: Any) -> RankPosition:
    """Return the position of a rank that computes in line 2."""
    given: dict[str, Any] = {"step": 0, "place": "line 2", "waits": False, "cpu_s": 0.0}
    return RankPosition(rank=rank, cell=CELL, **({"stack": ""} | given | fields))
