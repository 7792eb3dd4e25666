"""What a cell is (kernel → engine)."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.records.base import OnNan, Precision, Record, StrategyName
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


class StepOptions(Record, frozen=True):
    """How a step is to be run, as it was asked for.

    Attributes:
        data: the name of the data set on the ranks.
        epochs: how often the data are gone through.
        batch: samples in a global batch; 0 when the data's elements are batches already.
        shuffle: seed of the order of the samples; None leaves them in their order.
        steps: steps after which the run ends; 0 is no limit.
        bucket: lengths to which sequences are padded; none leaves them as they are.
        scale_lr: learning rates are multiplied by the number of replicas, after a warm-up.
        check: the first step is compared with one replica's before the run.
        jit: the step is compiled as a whole.
        on_nan: whether a value that is not finite ends the run.
        prefetch: batches that are made ahead of their steps; `auto` begins when steps wait.
        profile: steps that are traced after the first ones; 0 is none.
        profile_folder: where the trace of rank R goes, as `rank-R`; empty, it is not kept.
        planning: what is asked of the layout, under pjrt.
    """

    data: str
    epochs: int = 1
    batch: int = 0
    shuffle: int | None = None
    steps: int = 0
    bucket: tuple[int, ...] = ()
    scale_lr: bool = False
    check: bool = False
    jit: bool = False
    on_nan: OnNan = "stop"
    prefetch: int | Literal["auto"] = 0
    profile: int = 0
    profile_folder: str = ""
    planning: Planning = Planning()


class StepRequest(Record, frozen=True):
    """A step and how it is to be run."""

    program: StepProgram
    options: StepOptions


class Saving(Record, frozen=True):
    """How a run's state is saved, so that it can go on from there.

    Attributes:
        folder: where; the same one on every host.
        every_steps: steps between two checkpoints; 0 where `every_s` counts.
        every_s: seconds between two.
        keep: how many are kept; the oldest ones go.
        resume: the run goes on from the newest one, if there is one.
        shrink: it goes on with fewer ranks where some are lost and cannot be started again.
    """

    folder: str
    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 3
    resume: bool = False
    shrink: bool = False


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank is sent of cell number `number`; they count from 1 within the cluster."""

    number: int


SOON = -1
"""In `StopAfter`: the last step is still to be agreed on."""


class StopAfter(Command, frozen=True):
    """Steps were interrupted: the last one that ranks make.

    Attributes:
        step: counts from 1; `SOON` before the ranks have said how far they go.
        limit: how far a rank may go until it is known; 0 leaves that to the rank.
    """

    step: int
    limit: int = 0


WATCHDOG = "watchdog "
"""What the announcement of an engine's watchdog begins with; its rank follows."""


class Diagnose(Command, frozen=True):
    """Say where the main thread is (`Where`): asked of the watchdog.

    Attributes:
        waits: say also whether it waits in a collective. A rank that has ended the cell answers.
    """

    waits: bool = False


class StatusQuery(Command, frozen=True):
    """Say that the rank is in the cell, or how it ended there: asked of the watchdog.

    A rank that has not begun the cell says so, and does not begin it any more.
    """


class ForceInterrupt(Command, frozen=True):
    """No interrupt waits for the end of a step any more: asked of the watchdog."""


class AbortCollectives(Command, frozen=True):
    """End the collectives of a strategy that the main thread waits in: asked of the watchdog.

    Whoever waits in one gets an error at once. No collective works from then on, on any rank,
    before the strategy has been built again.
    """

    strategy: StrategyName


GUARD_STEPS = 200
"""Between two comparisons of the ranks' states, unless something else is asked for."""


class CellRequest(Command, frozen=True):
    """A cell to run once on each rank, or, with `step`, once for each batch.

    Attributes:
        source: the code, with as many lines before it as it has in the notebook.
        label: the notebook's own execution count, for tracebacks.
        strategy: the strategy whose scope the cell runs in, if any.
        awaits: the cell uses `await` at top level.
        precision: what Keras's layers compute in; None leaves it to them.
        saving: how the state of its steps, or of what it fits, is saved; None is not at all.
        names: the names that it reads and binds, if something is to be saved of it, or compared
            over ranks.
        makes: those of them that are its own: what they mean before it binds them is not its.
        replays: it is run again for the names that it binds: what it fits is not trained again.
        seconds: how long the run has gone on before; more than 0 where it is recovered.
        guard: steps after which the ranks' states are compared again; 0 is never.
        planning: what is asked of the layout of what the cell fits, under pjrt.
        seed: of every random generator when the cell begins; None leaves them as they are.
        own_data: what Keras is given is each rank's part of the data.
        generators: states that they take before, packed by `worker/runtime/rng_alignment.py`; empty
            leaves them.
    """

    source: str
    label: int
    strategy: StrategyName | None
    awaits: bool
    precision: Precision | None = None
    step: StepRequest | None = None
    saving: Saving | None = None
    names: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    replays: bool = False
    seconds: float = 0.0
    guard: int = GUARD_STEPS
    planning: Planning = Planning()
    seed: int | None = None
    own_data: bool = False
    generators: bytes = b""

    @property
    def is_plan(self) -> bool:
        """Whether it is only planned, and nothing is trained."""
        of_step = self.step is not None and self.step.options.planning.only
        return of_step or self.planning.only
