"""What a cell is (kernel → engine)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
from msgspec import structs

from nbdist.records.base import Record, StrategyName
from nbdist.records.cell_options import CellOptions, Saving, StepOptions
from nbdist.records.plan import Planning


class StepProgram(Record, frozen=True):
    """A cell as the body of a step; lines count from 1, the magic's own.

    Attributes:
        body: the function's lines from the second on; it returns (report, carried values).
        given: the names of the batch's arguments.
        reads: names that it takes from the namespace, with the line of their first use.
        carried: names that it reads and then assigns.
        carried_lines: the first line of each.
        report: the text of the expression that it reports.
    """

    body: str
    given: tuple[str, ...]
    reads: dict[str, int]
    carried: tuple[str, ...]
    carried_lines: dict[str, int]
    report: str


@dataclass(frozen=True)
class StepRequest:
    """A step and how it is to be run."""

    program: StepProgram
    options: StepOptions


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank is sent of cell number `number`; they count from 1 within the cluster."""

    number: int


SOON = -1
"""In `StopAfter`: the last step is still to be agreed on."""


class StopAfter(Order, frozen=True):
    """Steps were interrupted: the last one that ranks make.

    Attributes:
        step: counts from 1; `SOON` before the ranks have said how far they go.
        limit: how far a rank may go until it is known; 0 leaves that to the rank.
    """

    step: int
    limit: int = 0


WATCHDOG = "watchdog "
"""What the announcement of an engine's watchdog begins with; its rank follows."""


class Diagnose(Order, frozen=True):
    """Say where the main thread is (`Where`): asked of the watchdog.

    Attributes:
        waits: say also whether it waits in a collective. A rank that has ended the cell answers.
    """

    waits: bool = False


class StillThere(Order, frozen=True):
    """Say that the rank is in the cell, or how it ended there: asked of the watchdog.

    A rank that has not begun the cell says so, and does not begin it any more.
    """


class Hurry(Order, frozen=True):
    """No interrupt waits for the end of a step any more: asked of the watchdog."""


class BreakOff(Order, frozen=True):
    """End the collectives of a strategy that the main thread waits in: asked of the watchdog.

    Whoever waits in one gets an error at once. No collective works from then on, on any rank,
    before the strategy has been built again.
    """

    strategy: StrategyName


class CellRequest(Order, frozen=True):
    """A cell to run once on each rank, or, with `program`, once for each batch.

    Attributes:
        source: the code, with as many lines before it as it has in the notebook.
        label: the notebook's own execution count, for tracebacks.
        strategy: the strategy whose scope the cell runs in, if any.
        awaits: the cell uses `await` at top level.
        options: the options of the cell, as given.
        program: the cell as the body of a step.
        names: the names that it reads and binds, if something is to be saved of it, or compared
            over ranks.
        makes: those of them that are its own: what they mean before it binds them is not its.
        replays: it is run again for the names that it binds: what it fits is not trained again.
        seconds: how long the run has gone on before; more than 0 where it is healed.
        generators: states that they take before, packed by `worker/runtime/rng_alignment.py`; empty
            leaves them.
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
    generators: bytes = b""

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
        """True if the cell is planned, and nothing is trained."""
        return self.options.step is not None and self.options.step.planning.only

    def with_options(self, **changes: object) -> Self:
        """Return the request with other options."""
        return structs.replace(self, options=structs.replace(self.options, **changes))
