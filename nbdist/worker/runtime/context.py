"""What this engine is: its rank, its probe, its strategies. One per process."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nbdist.records import Columns, Metrics, Note, Planning
from nbdist.worker.runtime.cell_names import NamesOfCell
from nbdist.worker.runtime.memory import MemoryGauge
from nbdist.worker.runtime.output import DescriptorTap, LogTap, RankDisplayPublisher, RankStream
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import (
        AnyEvent,
        CellEnded,
        CellRequest,
        NoteTopic,
        Saving,
        StrategyName,
        WorkerIdentity,
    )
    from nbdist.worker.runtime.stop_point import StopPoint


class ShuffleOrder:
    """The order of the samples of one `fit` whose user has set no seed.

    Args:
        seed: of the order; 0 if the `fit` does not shuffle, or has a seed of the user's.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class FitCounter(Protocol):
    """Counter of the fits of a cell."""

    fits: int


class Worker:
    """One rank. Created when the engine is told who it is.

    Attributes:
        stream_key: the key of the notebook's stream, known to the notebook and its ranks alone.
        cell: the number of the cell that runs; 0 between cells.
        strategies: what was built.
        memory: measures what this process takes.
        stop_point: within it, an interrupt is put off until all ranks can stop at the same step.
        force_interrupt: from here on, no interrupt of this cell is put off.
        shield: within it, an interrupt waits for its end.
        batches: how many batches `fit` has gone through in this cell.
        step: the last step that was begun in this cell; 0 is none.
        tested: how many batches this cell has gone through without training on them.
        strategy: the one whose scope the cell runs in; None outside of cells, and on few ranks.
        broken: the strategies whose collectives were broken off.
        preempted: the process was told to end, and does so after the cell.
        unfinished: the cell has left steps under way.
        epochs: the last epoch that a `fit` of this cell has begun, as it was reported.
        ended: how the last cell did.
        ending: what is to be closed when the cell ends, however it does.
        saving: how the state of what the cell fits is saved.
        names: what the cell reads and binds, where something is to be saved of it, or compared.
        replays: the cell is run again for the names that it binds: nothing is trained.
        fits: counts the fits of the cell; None before the first.
        passed_rows: of the batches that a `fit` which goes on has passed over; 0 is none.
        planning: what is asked of the layout of what the cell fits.
        seed: of the generators at the start.
        order: of the `fit`, `evaluate` or `predict` that began last.
        source: a number for the source of the cell that runs.
        shuffles: how many data sets the cell has shuffled without a seed.
        own_data: what Keras is given is this rank's part of the data.
        collective_keys: digests the keys of this rank's next collectives of TensorFlow.
        guard: steps after which what it trains is compared with the other ranks'; 0 is never.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.stream_key = identity.stream.server_key
        self.seed = identity.seed
        self.order = ShuffleOrder()
        self.source = self.shuffles = 0
        self.own_data = False
        self.cell = self._refused = 0
        self._beginning = threading.Lock()
        self.strategies: dict[StrategyName, Any] = {}
        self.stop_point: Callable[[], contextlib.AbstractContextManager[StopPoint]] = _no_cell
        self.force_interrupt: Callable[[], None] = _no_cell
        self.shield: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self.batches = 0
        self.epochs = 0
        self.step = self.tested = 0
        self.strategy: StrategyName | None = None
        self.broken: set[StrategyName] = set()
        self.preempted = self.unfinished = False
        self.ended: CellEnded | None = None
        self.ending = contextlib.ExitStack()
        self.saving: Saving | None = None
        self.names = NamesOfCell()
        self.replays = False
        self.fits: FitCounter | None = None
        self.planning = Planning()
        self.passed_rows = 0
        self.guard = 0
        self._noted: set[str] = set()
        self.memory = MemoryGauge()
        self.collective_keys: Callable[[], int] = int
        self._reporter = Reporter(identity.stream, RowBuffer(identity.rank, self.memory))
        self._stdout = RankStream("stdout", self.said, self.say)
        self._stderr = RankStream("stderr", self.said, self.say)
        self._reported_steps = 0
        self._cell_started = time.perf_counter()

    def say(self, record: AnyEvent, *, urgent: bool = False) -> None:
        with self.shield:
            self._reporter.say(record, urgent=urgent)

    def note(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        """Say a line about the run; the same line of several ranks is shown once."""
        self.say(Note(topic=topic, text=text, warning=warning, **self.said()))

    def note_once(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        """Say a line that this cell has not said before."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(topic, text, warning=warning)

    def flush(self) -> None:
        """What was said and reported is on its way: it is not lost with this process."""
        with self.shield:
            self._reporter.flush()

    def said(self) -> dict[str, Any]:
        """The fields that every record begins with."""
        return {"rank": self.rank, "cell": self.cell}

    def may_begin(self, cell: int) -> bool:
        """Whether the notebook has not been told that this rank does not begin the cell."""
        with self._beginning:
            if cell > self._refused:
                self.cell = cell
            return cell > self._refused

    def refuse_unbegun(self, cell: int) -> bool:
        """From here on the cell does not begin, unless it has. Any thread."""
        with self._beginning:
            has_ended = self.ended is not None and self.ended.cell == cell
            if self.cell != cell and not has_ended:
                self._refused = max(self._refused, cell)
            return cell <= self._refused

    def begin_cell(self, request: CellRequest) -> None:
        self.cell = request.number
        self.strategy = request.strategy
        self._noted.clear()
        self.saving = request.saving
        self.names = NamesOfCell(request.names, request.makes)
        self.replays, self.guard = request.replays, request.options.guard
        self.planning = request.planning
        self.own_data = request.options.own_data
        self.source, self.shuffles = zlib.crc32(request.source.encode()), 0
        self.unfinished = False
        self.fits = None
        self.batches = self.step = self.tested = 0
        self.epochs = 0
        self._reported_steps = 0
        self._cell_started = time.perf_counter() - request.seconds
        self.memory.begin()

    def end_cell(self, error: BaseException | None = None) -> None:
        """Output that threads write from here on belongs to no cell."""
        try:
            self.ending.__exit__(None if error is None else type(error), error, None)
        finally:
            for tap in self._taps:
                tap.settle()
            self.cell, self.strategy = 0, None

    def leave(self) -> None:
        """The process is about to end: what was said arrives first."""
        self._reporter.close()

    def seconds(self) -> float:
        return time.perf_counter() - self._cell_started

    def report(self, epoch: int = -1, step: int | None = None, **metrics: Any) -> None:
        """Show scalars of this rank in the notebook, live.

        Args:
            epoch: the epoch they belong to, counting from 1; left out, there is none.
            step: the step they belong to; left out, reports without an epoch are counted.
            **metrics: named scalars; anything that `float` takes.
        """
        if step is None:
            self._reported_steps += 1
            step = -1 if epoch >= 0 else self._reported_steps
        own = {name: _scalar(name, value) for name, value in metrics.items()}
        self.report_values(epoch, step, own=own, shared={})

    def report_values(
        self,
        epoch: int,
        step: int,
        *,
        own: dict[str, float],
        shared: dict[str, float],
        measured: dict[str, float] | None = None,
    ) -> None:
        """Show scalars: this rank's own, those that are the same on all, and what was measured.

        Those of a step go in rows, with many others; those of an epoch at once.
        """
        seconds = self.seconds()
        if step < 0:
            said = self.said()
            self.say(
                Metrics(epoch=epoch, step=step, time_s=seconds, own=own, shared=shared, **said)
            )
            return
        measured = measured or {}
        columns = Columns(measures=tuple(measured), own=tuple(own), shared=tuple(shared))
        row = (epoch, step, seconds, *measured.values(), *own.values(), *shared.values())
        with self.shield:
            self._reporter.report(self.cell, columns, row)

    def scope(self, strategy: StrategyName | None) -> contextlib.AbstractContextManager[object]:
        """The scope of the strategy, or of none; raises LookupError when it was not built."""
        if strategy is None:
            return contextlib.nullcontext()
        if strategy not in self.strategies:
            raise LookupError(f"strategy {strategy!r} is not built on rank {self.rank}")
        scope: contextlib.AbstractContextManager[object] = self.strategies[strategy].scope()
        return scope

    def take_over_output(self) -> None:
        """From here on, what this process prints and displays goes to the notebook."""
        self._taps = (DescriptorTap(self._stdout.write), LogTap(self._stderr.write))
        shell = engine_shell()
        sys.stdout = self._stdout
        sys.stderr = self._stderr
        shell.display_pub = RankDisplayPublisher(self.said, self.say, parent=shell)


def _no_cell() -> NoReturn:
    raise RuntimeError("no cell runs on this rank")


def _scalar(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"report({name}={value!r}): not a scalar ({error})") from None


_worker: Worker | None = None


def become(identity: WorkerIdentity) -> Worker:
    """Make this process the rank that `identity` names, and its output the notebook's."""
    global _worker  # noqa: PLW0603 - a process is one rank; requests that come later must find it
    if _worker is not None:
        raise RuntimeError(f"this engine is rank {_worker.rank} already")
    _worker = Worker(identity)
    _worker.take_over_output()
    return _worker


def current() -> Worker:
    """The rank that this process is."""
    if _worker is None:
        raise RuntimeError("this engine has not been told its rank")
    return _worker


def if_any() -> Worker | None:
    """The rank that this process is; None before it has been told."""
    return _worker


def strategies() -> dict[StrategyName, Any]:
    """What was built on this rank; nothing in a process that is none."""
    return {} if _worker is None else _worker.strategies


def cell_strategy() -> Any:
    """The strategy in whose scope a cell runs on all ranks; None for no scope or no cell."""
    if _worker is None or _worker.strategy is None:
        return None
    return _worker.strategies.get(_worker.strategy)


def in_cell() -> bool:
    """Return whether a cell runs in this process."""
    return _worker is not None and _worker.cell != 0
