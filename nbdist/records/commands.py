"""Cells and commands from the kernel to engines."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.records.base import OnNan, Precision, Record, StrategyName
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


class StepOptions(Record, frozen=True):
    """Options of a step cell.

    Attributes:
        data: name of the data set on the ranks.
        epochs: passes over the data.
        batch: samples in a global batch; 0 if the elements of the data are batches.
        shuffle: seed of the order of samples; None to keep their order.
        steps: steps of the run; 0 for no limit.
        bucket: lengths to which sequences are padded; empty for no padding.
        scale_lr: multiply learning rates by the number of replicas after a warm-up.
        check: compare the first step with a step on one replica before the run.
        jit: compile the step as a whole.
        on_nan: action on a value that is not finite.
        prefetch: batches prepared ahead of their steps; `auto` starts when steps wait.
        profile: steps to trace after the first ones; 0 for none.
        profile_folder: folder of the traces `rank-R`; empty to discard them.
        planning: request to the planner, under pjrt.
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
    """A step and its options."""

    program: StepProgram
    options: StepOptions


class Saving(Record, frozen=True):
    """Checkpoints of a run.

    Attributes:
        folder: path of the checkpoints, the same on every host.
        every_steps: steps between two checkpoints; 0 if `every_s` is set.
        every_s: seconds between two checkpoints.
        keep: number of checkpoints to keep. nbdist deletes the oldest.
        resume: resume from the newest checkpoint, if one exists.
        shrink: continue with fewer ranks if lost ranks cannot be restarted.
    """

    folder: str
    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 3
    resume: bool = False
    shrink: bool = False


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
    """Ask the watchdog for the position of the main thread (`Where`).

    Attributes:
        waits: report also if it waits in a collective. A rank that ended the cell answers.
    """

    waits: bool = False


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


GUARD_STEPS = 200
"""Default number of steps between two comparisons of the ranks' states."""


class CellRequest(Command, frozen=True):
    """A cell to run once on each rank, or once for each batch if `step` is set.

    Attributes:
        source: the code, after as many empty lines as precede it in the notebook cell.
        label: execution count of the notebook, for tracebacks.
        strategy: strategy whose scope the cell runs in; None for no scope.
        awaits: the cell uses `await` at top level.
        precision: compute type of Keras layers; None to leave their policy.
        saving: checkpoints of its steps or of its `fit`; None for no checkpoints.
        names: names that the cell reads and binds, if they are saved or compared over ranks.
        makes: those names that the cell binds before it reads them.
        replays: nbdist repeats the cell for the names that it binds. `fit` does not train again.
        seconds: duration of the run before a recovery; 0 for a new run.
        guard: steps between two comparisons of the ranks' states; 0 for none.
        planning: request to the planner for what the cell fits, under pjrt.
        seed: seed of every random generator at the start of the cell; None to keep the states.
        own_data: the data for Keras are each rank's own part.
        generators: states of the generators at the start of the cell, packed by
            `worker/runtime/rng_alignment.py`; empty to keep the states.
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
        """True if nbdist plans the cell and does not train."""
        of_step = self.step is not None and self.step.options.planning.only
        return of_step or self.planning.only
