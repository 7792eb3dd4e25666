"""The rank of this process: its identity, its strategies and its cell. One per process."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from nbdist.worker.runtime.cell_state import CellState
from nbdist.worker.runtime.interrupts import Interrupts
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.output import RankOutput
from nbdist.worker.runtime.rank_reporter import RankReporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import CellEnded, CellRequest, StrategyName, WorkerIdentity
    from nbdist.worker.runtime.cell_state import Progress
    from nbdist.worker.runtime.rank_reporter import Recipient
    from nbdist.worker.runtime.stop_point import StopPoint


class Worker:
    """One rank. The engine creates it when it receives its identity.

    Args:
        identity: the rank, the world size, the notebook's addresses, the seed.
        recipient: takes the records of this rank; None for the notebook.

    Attributes:
        memory: measures the memory of this process and its devices.
        interrupts: handles SIGINT.
        reporter: sends records to the notebook.
        cell_state: state of the cell that runs, or of the last one.
        ended: result of the last cell; None before the first has ended.
        ending: closed when the cell ends, whatever its result is.
        strategies: strategies that this rank has built.
        broken: strategies whose collectives were aborted.
        collective_keys: returns a digest of the keys of this rank's next TensorFlow collectives.
        preempted: True if the process received SIGTERM; it then exits after the cell.
    """

    def __init__(self, identity: WorkerIdentity, recipient: Recipient | None = None) -> None:
        self.identity = identity
        self.memory = MemoryGauge()
        self.interrupts = Interrupts()
        self.reporter = RankReporter(identity, self.memory, self.interrupts.shield, recipient)
        self.cell_state = CellState()
        self.ended: CellEnded | None = None
        self.ending = contextlib.ExitStack()
        self.strategies: dict[StrategyName, Any] = {}
        self.broken: set[StrategyName] = set()
        self.collective_keys: Callable[[], int] = int
        self.preempted = False
        self._output = RankOutput(self.reporter)
        self._refused = 0
        self._beginning = threading.Lock()

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def world_size(self) -> int:
        return self.identity.world_size

    @property
    def cell(self) -> int:
        """Number of the cell that runs; 0 between cells."""
        return self.reporter.cell

    @property
    def request(self) -> CellRequest:
        """The cell that runs, or the last one; an empty one before the first."""
        return self.cell_state.request

    @property
    def progress(self) -> Progress:
        """Progress of the cell."""
        return self.cell_state.progress

    @property
    def strategy(self) -> StrategyName | None:
        """Strategy of the scope that the cell runs in; None without one, and between cells."""
        return self.request.strategy if self.cell else None

    def may_begin(self, cell: int) -> bool:
        """Mark the cell as begun, unless this rank has refused it; return whether it may begin."""
        with self._beginning:
            if cell > self._refused:
                self.reporter.cell = cell
            return cell > self._refused

    def refuse_unbegun(self, cell: int) -> bool:
        """Refuse the cell unless it has begun; return whether it is refused. Thread-safe."""
        with self._beginning:
            has_ended = self.ended is not None and self.ended.cell == cell
            if self.cell != cell and not has_ended:
                self._refused = max(self._refused, cell)
            return cell <= self._refused

    def begin_cell(
        self,
        request: CellRequest,
        stop_point: Callable[[], contextlib.AbstractContextManager[StopPoint]],
    ) -> None:
        """Begin a cell; `CellState` describes the arguments."""
        self.cell_state = CellState(request, stop_point)
        self.reporter.begin_cell(request.number, request.seconds, request.run)
        self.memory.begin()

    def end_cell(self, error: BaseException | None = None) -> None:
        """End the cell. Output that threads write afterwards belongs to no cell."""
        try:
            self.ending.__exit__(None if error is None else type(error), error, None)
        finally:
            self._output.settle()
            self.reporter.cell = 0

    def scope(self, strategy: StrategyName | None) -> contextlib.AbstractContextManager[object]:
        """Return the scope of a strategy; an empty context if `strategy` is None.

        Raises:
            LookupError: this rank has not built the strategy.
        """
        if strategy is None:
            return contextlib.nullcontext()
        if strategy not in self.strategies:
            raise LookupError(f"strategy {strategy!r} is not built on rank {self.rank}")
        scope: contextlib.AbstractContextManager[object] = self.strategies[strategy].scope()
        return scope

    def take_over_output(self) -> None:
        """Send all further output of this process to the notebook."""
        self._output.take_over()


_worker: Worker | None = None


def become(identity: WorkerIdentity, recipient: Recipient | None = None) -> Worker:
    """Make this process the rank of `identity`.

    Its output goes to the notebook, unless a `recipient` takes its records.
    """
    global _worker  # noqa: PLW0603 - a process is one rank; later requests must find it
    if _worker is not None:
        raise RuntimeError(f"this engine is already rank {_worker.rank}")
    _worker = Worker(identity, recipient)
    if recipient is None:
        _worker.take_over_output()
    return _worker


def current() -> Worker:
    """Return the rank of this process."""
    if _worker is None:
        raise RuntimeError("this engine has no rank yet")
    return _worker


def if_any() -> Worker | None:
    """Return the rank of this process; None if it has none yet."""
    return _worker


def strategies() -> dict[StrategyName, Any]:
    """Return the strategies of this rank; empty if the process has no rank."""
    return {} if _worker is None else _worker.strategies


def cell_strategy() -> Any:
    """Return the strategy in whose scope a cell runs; None without a scope or a cell."""
    if _worker is None or _worker.strategy is None:
        return None
    return _worker.strategies.get(_worker.strategy)


def in_cell() -> bool:
    """Return True if a cell runs in this process."""
    return _worker is not None and _worker.cell != 0
