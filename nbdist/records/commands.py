"""Cells and commands from the kernel to engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
from msgspec import structs

from nbdist.records.base import Record, StrategyName
from nbdist.records.cell_options import CellOptions, Saving, StepOptions
from nbdist.records.cluster import WorkerState
from nbdist.records.plan import Planning


class StepProgram(Record, frozen=True):
    """A cell as the body of a step function. Line 1 is the magic's line.

    Attributes:
        body: lines of the function after its first. It returns (report, carried values).
        given: parameter names of the batch.
        reads: names read from the namespace, with the line of their first use.
        carried: names that the step reads and then assigns.
        carried_lines: first line of each carried name.
        report: source of the reported expression.
    """

    body: str
    given: tuple[str, ...]
    reads: dict[str, int]
    carried: tuple[str, ...]
    carried_lines: dict[str, int]
    report: str


@dataclass(frozen=True)
class StepRequest:
    """A step and its options."""

    program: StepProgram
    options: StepOptions


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command to a rank about cell `number`, which counts from 1 in the cluster."""

    number: int


SOON = -1
"""Value of `StopAfter.step` until the ranks agree on the last step."""


class StopAfter(Command, frozen=True):
    """End the steps of a cell after a last step.

    Attributes:
        step: last step, from 1; `SOON` until the ranks have reported their progress.
        limit: last step that a rank may start until then; 0 for the rank's choice.
    """

    step: int
    limit: int = 0


WATCHDOG = "watchdog "
"""Prefix of the announcement of an engine's watchdog; the rank follows."""


class Diagnose(Command, frozen=True):
    """Ask the watchdog for the position of the main thread (`RankPosition`).

    Attributes:
        waits: report also if it waits in a collective. A rank that ended the cell answers.
        threads: report also the stacks of all threads.
    """

    waits: bool = False
    threads: bool = False


class StatusQuery(Command, frozen=True):
    """Ask the watchdog if the rank is in the cell, or how the cell ended there.

    A rank that has not started the cell reports that and does not start it any more.
    """


class ForceInterrupt(Command, frozen=True):
    """Tell the watchdog to raise interrupts at once, not at the end of a step."""


class AbortCollectives(Command, frozen=True):
    """Tell the watchdog to abort the collectives of a strategy that the main thread waits in.

    A thread that waits in one gets an error at once. No collective of the strategy works on any
    rank until nbdist rebuilds the strategy.
    """

    strategy: StrategyName


class CellRequest(Command, frozen=True):
    """A cell to run once on each rank, or once for each batch if `program` is set.

    Attributes:
        source: the code. A comment replaces the line of the magic, so that line numbers stay valid.
        label: execution count of the notebook, for tracebacks.
        strategy: strategy whose scope the cell runs in; None for no scope.
        awaits: the cell uses `await` at top level.
        options: options of the cell, as given.
        program: body of the step; None for a plain cell.
        names: names that the cell reads and binds, if they are saved or compared over ranks.
        makes: those names that the cell binds before it reads them.
        replays: nbdist repeats the cell for the names that it binds. `fit` does not train again.
        seconds: duration of the run before a recovery; 0 for a new run.
        run: number of the run: that of the cell in the first attempt.
        generators: states of the generators at the start of the cell, packed by
            `worker/runtime/rng_alignment.py`; empty to keep the states.
        fits: records of the fits of each rank in the first run of a cell that nbdist repeats,
            packed by `worker/checkpoint/fit_records.py`.
    """

    source: str
    label: int
    strategy: StrategyName | None
    awaits: bool
    options: CellOptions = CellOptions()
    program: StepProgram | None = None
    names: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    replays: bool = False
    seconds: float = 0.0
    run: int = 0
    generators: bytes = b""
    fits: dict[int, bytes] = {}

    def fits_of(self, rank: int) -> bytes:
        """Return the records of a rank; of the last rank if the first run had fewer."""
        return self.fits[min(rank, max(self.fits))] if self.fits else b""

    @property
    def step(self) -> StepRequest | None:
        """The step and its options; None for a plain cell."""
        if self.program is None or self.options.step is None:
            return None
        return StepRequest(self.program, self.options.step)

    @property
    def saving(self) -> Saving | None:
        return self.options.saving

    @property
    def planning(self) -> Planning:
        """Constraints on the layout of the `fit` in a plain cell, under pjrt."""
        step = self.options.step
        return Planning() if step is None or step.data else step.planning

    @property
    def is_plan(self) -> bool:
        """True if nbdist plans the cell and does not train."""
        return self.options.step is not None and self.options.step.planning.only

    def with_options(self, **changes: object) -> Self:
        """Return the request with other options."""
        return structs.replace(self, options=structs.replace(self.options, **changes))


class ProgramCell(Record, frozen=True):
    """A cell of an exported program that begins, for the process that stores the program's runs.

    Attributes:
        request: the cell.
        header: line of the program that begins the cell.
        program: file name of the program.
        source: source of the program; empty if it is no file.
        workers: all ranks.
        seed: seed of all ranks.
    """

    request: CellRequest
    header: str
    program: str
    source: str
    workers: tuple[WorkerState, ...]
    seed: int
