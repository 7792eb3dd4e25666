"""What a rank says while it runs a cell (engine → kernel)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import msgspec

from nbdist.records.base import MimeBundle, NoteTopic, Record, StrategyName, StreamName
from nbdist.records.plan import Plan  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = ("rank", "epoch", "step", "time_s")
"""The first columns of every row; -1 where an epoch or a step has no meaning."""

MEASURES = ("step_s", "input_s", "collective_s", "process_bytes", "device_bytes")
"""What nbdist measures beside the metrics.

`step_s` from the end of a step to the end of the next, `input_s` of it waiting for the batch,
`collective_s` of it in collectives; memory of the process, and of its fullest device. What is not
known is left out, or NaN: a 0 was measured.
"""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whatever rank `rank` says of cell number `cell`; 0 is between cells."""

    rank: int
    cell: int


class Output(Event, frozen=True):
    """Text that the rank wrote: any number of whole or partial lines."""

    stream: StreamName
    text: str


class Display(Event, frozen=True):
    """A rich display, or (with `result`) the value of the cell's last expression."""

    data: MimeBundle
    metadata: MimeBundle
    result: bool = False
    display_id: str = ""
    update: bool = False


class Metrics(Event, frozen=True):
    """Scalars that the rank reports; -1 where an epoch or a step has no meaning.

    `own` are this rank's, `shared` were reduced over all ranks and are the same on each.
    """

    epoch: int
    step: int
    time_s: float
    own: dict[str, float]
    shared: dict[str, float] = {}


class Columns(Record, frozen=True):
    """What a report holds after its `PLACE`, in this order.

    Attributes:
        measures: what nbdist measured, of `MEASURES`.
        own: metrics of the rank's own.
        shared: metrics reduced over all ranks, the same on each.
    """

    measures: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, those of `PLACE` too."""
        return (*PLACE, *self.measures, *self.own, *self.shared)

    def counts(self, is_step: bool) -> bool:
        """Whether such rows belong to the history of a run, which is a step cell or is none.

        The memory does not. What `fit` measures are batches, whose metrics are means since the
        epoch began; its history is that of the epochs.
        """
        return bool(self.own or self.shared) and (is_step or not self.measures)


class Rows(Event, frozen=True):
    """Reports of one rank, many at once: a table of float64, little-endian, row by row.

    Attributes:
        columns: what a row holds.
        values: shape (rows, len(columns.names)).
        dropped: rows that were lost since the last time, for want of room.
    """

    columns: Columns
    values: bytes
    dropped: int = 0

    def unpacked(self) -> Iterator[Metrics]:
        """Every row's metrics; what nbdist measured is left out."""
        for values in struct.iter_unpack(self._layout, self.values):
            yield self._metrics(values)

    def last(self) -> Metrics:
        """The last row's metrics; there has to be a row."""
        offset = len(self.values) - struct.calcsize(self._layout)
        return self._metrics(struct.unpack_from(self._layout, self.values, offset))

    @property
    def _layout(self) -> str:
        return f"<{len(self.columns.names)}d"

    def _metrics(self, values: tuple[float, ...]) -> Metrics:
        columns = self.columns
        first_own = len(PLACE) + len(columns.measures)
        first_shared = first_own + len(columns.own)
        rank, epoch, step, time_s = values[: len(PLACE)]
        return Metrics(
            rank=int(rank),
            cell=self.cell,
            epoch=int(epoch),
            step=int(step),
            time_s=time_s,
            own=dict(zip(columns.own, values[first_own:first_shared], strict=True)),
            shared=dict(zip(columns.shared, values[first_shared:], strict=True)),
        )


class Rate(Record, frozen=True):
    """A learning rate as `--scale-lr` found it, and as it is after `warmup_steps`."""

    name: str
    before: float
    after: float
    warmup_steps: int


class StepBegun(Event, frozen=True):
    """A step cell is about to make its first step.

    Attributes:
        replicas: how many share a batch.
        batch: samples in the first global batch.
        samples: samples in an epoch; -1 where nobody knows.
        epochs: how many there will be.
        steps: steps of the whole run; -1 where nobody knows.
        sharding: how samples come to the ranks, in words.
        rates: learning rates that are scaled.
        changes: names whose values the steps change.
    """

    replicas: int
    batch: int
    samples: int
    epochs: int
    steps: int
    sharding: str
    rates: tuple[Rate, ...]
    changes: tuple[str, ...] = ()


class Planned(Event, frozen=True):
    """A step is laid out so; said by rank 0.

    Attributes:
        only: it is not run.
    """

    plan: Plan
    only: bool = False


class Compiled(Event, frozen=True):
    """A step was compiled; said by rank 0. Bytes are those of one device, as XLA counts them.

    Attributes:
        arguments: of what the step is given.
        temporaries: of what it makes on its way, where the compiler tells.
        seconds: that it took to compile.
    """

    arguments: int
    temporaries: int
    seconds: float


class Opened(Event, frozen=True):
    """The state of a run is saved from here on.

    Attributes:
        names: names whose values are saved.
        step: the last one before that the state is of; -1 where the run begins.
    """

    names: tuple[str, ...]
    step: int = -1


class FitBegun(Event, frozen=True):
    """A `fit` of Keras's begins.

    Attributes:
        epochs: how many there will be.
        steps: steps of them all; -1 where nobody knows.
    """

    epochs: int
    steps: int


class Note(Event, frozen=True):
    """Something about a run that is worth a line: said once, by the ranks that see it.

    Attributes:
        topic: what it is about.
        text: the line.
        warning: whether something should be done.
    """

    topic: NoteTopic
    text: str
    warning: bool


class Difference(Record, frozen=True):
    """One value after a step on one replica and after the same step on all.

    Attributes:
        name: the variable's, or the reported scalar's.
        shape: empty for a scalar.
        dtype: of the values.
        largest: the largest difference of an element, relative to the largest change.
        tolerance: what `largest` may be.
        reported: it is a scalar that the step reports.
    """

    name: str
    reported: bool
    shape: tuple[int, ...]
    dtype: str
    largest: float
    tolerance: float

    @property
    def passes(self) -> bool:
        return self.largest <= self.tolerance


class Checked(Event, frozen=True):
    """What `--check` found.

    Attributes:
        rows: samples in the batch.
        replicas: how many shared it.
        differences: the reported scalars, then the variables.
        causes: what the differences look like, in words; empty when all pass.
    """

    rows: int
    replicas: int
    differences: tuple[Difference, ...]
    causes: tuple[str, ...]


class Operation(Record, frozen=True):
    """What a traced step did, added up by name.

    Attributes:
        name: as the framework has it.
        seconds: of a step, in all executions.
        count: executions in a step, the mean.
    """

    name: str
    seconds: float
    count: float


class Profiled(Event, frozen=True):
    """Where the time of a rank's steps went, by a trace of some.

    Times are seconds of a step, the mean over steps and devices, and add up to `step_s`: what one
    kind hides of the next, in this order, counts as its own.

    Attributes:
        steps: how many were traced; 0 where the run ended before.
        step_s: the whole of a step.
        compute_s: devices computed.
        collective_s: they waited for collectives.
        to_device_s: they waited for what came from the host.
        to_host_s: the host waited for what came from them.
        top: the operations that took longest; none where the framework cannot be traced: then
            computing is all that is neither in collectives nor waiting for data.
        folder: where the trace is; empty where there is none, or it was not kept.
    """

    steps: int
    step_s: float = 0.0
    compute_s: float = 0.0
    collective_s: float = 0.0
    to_device_s: float = 0.0
    to_host_s: float = 0.0
    top: tuple[Operation, ...] = ()
    folder: str = ""

    @property
    def other_s(self) -> float:
        """The rest: Python, input, and nothing at all."""
        known = self.compute_s + self.collective_s + self.to_device_s + self.to_host_s
        return max(0.0, self.step_s - known)


class Failure(Record, frozen=True):
    """An exception as it looked on its rank.

    `same` is equal on ranks that raised for the same reason at the same line. One that `follows`
    was raised for the sake of another rank, whose own failure tells more.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    same: str
    follows: bool = False


class Replicated(Record, frozen=True):
    """Digests of the values under a name that should be the same on all ranks.

    Attributes:
        name: in the user's namespace.
        number: the digest of all values.
        changed: the cell has changed one of them.
        parts: the digest of each value by its path, such as `params['w']`.
    """

    name: str
    number: int
    changed: bool
    parts: dict[str, int] = msgspec.field(default_factory=dict)


class CellEnded(Event, frozen=True):
    """The rank is done with the cell: its last record of it.

    Attributes:
        unfinished: steps were left under way, whose collectives may never end, or collectives have
            failed by themselves.
        replicated: digests for the names that a plain cell reads or binds: of replicated arrays
            under pjrt, of mirrored variables under mirrored.
        collective_keys: the digest of the keys of this rank's next collectives of TensorFlow; 0
            without TensorFlow. Ranks with different keys cannot meet in a collective.
        generators: a number for the state of each global random generator, by its library.
        generator_states: the states, packed by `worker/runtime/rng_alignment.py`; of rank 0 only.
    """

    status: Literal["ok", "error", "interrupted"]
    seconds: float
    failure: Failure | None = None
    unfinished: bool = False
    replicated: tuple[Replicated, ...] = ()
    collective_keys: int = 0
    generators: dict[str, int] = msgspec.field(default_factory=dict)
    generator_states: bytes = b""


class Stopping(Event, frozen=True):
    """Steps were interrupted: the rank makes none beyond `limit` until it is answered."""

    limit: int


class Preempted(Event, frozen=True):
    """The rank's process was told to end (SIGTERM): it does at the end of the cell."""


class Beat(Event, frozen=True):
    """The rank's process runs and is in the cell; once a second.

    Attributes:
        step: the last one that it began; 0 is none.
        tested: batches that it went through without training on them.
    """

    step: int
    tested: int


class Where(Event, frozen=True):
    """Where a rank is in its cell, asked while its main thread may hang.

    Attributes:
        step: the last one that it began; 0 is none.
        place: the innermost line of a cell's, as `Cell In[3], line 14`; empty where it is in none.
        waits: for another thread: as a rule, for the framework's, which are in a collective.
        cpu_s: what its main thread has computed since it was started.
        stack: of its main thread, the outermost call first, from the cell on; empty where the step
            itself is made.
        collective: the strategy in whose collective the main thread waits; None for no wait, or if
            it was not asked for.
        under_way: a computation or a collective of this rank goes on, whoever waits for it.
        process_s: processor time of the process.
        clock_s: this host's monotonic clock.
    """

    step: int
    place: str
    waits: bool
    cpu_s: float
    stack: str
    collective: StrategyName | None = None
    under_way: bool = False
    process_s: float = 0.0
    clock_s: float = 0.0
