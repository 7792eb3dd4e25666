"""Events that a rank sends to the kernel while it runs a cell."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import msgspec

from nbdist.records.base import MimeBundle, NoteTopic, Record, StrategyName, StreamName
from nbdist.records.media import AnyMedia  # noqa: TC001 - msgspec reads the annotation
from nbdist.records.plan import Plan  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = ("rank", "epoch", "step", "time_s")
"""First columns of every row. Epoch and step are -1 if they have no meaning."""

MEASURES = ("step_s", "input_s", "collective_s", "process_bytes", "device_bytes", "report_s")
"""Measurements of nbdist beside the metrics.

`step_s`: seconds from the end of a step to the end of the next. `input_s`: seconds of it that the
step waited for its batch. `collective_s`: seconds of it in collectives. `process_bytes`: memory of
the process. `device_bytes`: used memory of its fullest device. `report_s`: seconds between calls of
`report` in a loop whose steps nbdist does not time. Unknown values are NaN or missing.
"""

SYSTEM = (
    "cpu_cores",
    "host_cpu",
    "rss_bytes",
    "host_memory",
    "sent_bytes_s",
    "received_bytes_s",
    "read_bytes_s",
    "written_bytes_s",
    "gpu_use",
    "gpu_bytes",
    "gpu_celsius",
    "gpu_watts",
)
"""Use of the host at intervals, in this order.

`cpu_cores`, `rss_bytes`, `read_bytes_s` and `written_bytes_s` are those of the process: busy cores,
resident memory, disk. `host_cpu`, `host_memory` and `gpu_use` are shares from 0 to 1. The network
is that of the host. GPUs are those of the process. Unknown values are missing.
"""

SIGNALS = ("grad_norm", "param_norm", "update_ratio", "learning_rate")
"""Metrics of `--watch`. With several optimizers, `learning_rate of NAME` replaces the last one."""

SIGNAL_STEPS = 20
"""Steps between two steps with signals."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An event of rank `rank` in cell number `cell`; 0 between cells."""

    rank: int
    cell: int


DROPPED_TEXT = "\n[nbdist: {count} characters of the output were not stored]\n"
"""Line in the output of a rank in place of dropped text."""


class Output(Event, frozen=True):
    """Text that the rank wrote: complete or partial lines."""

    stream: StreamName
    text: str


class Display(Event, frozen=True):
    """A rich display. With `result`, the value of the last expression of the cell."""

    data: MimeBundle
    metadata: MimeBundle
    result: bool = False
    display_id: str = ""
    update: bool = False


class Metrics(Event, frozen=True):
    """Scalars that the rank reports. Epoch and step are -1 if they have no meaning.

    `own` belongs to this rank. `shared` was reduced over all ranks and is equal on each.
    """

    epoch: int
    step: int
    time_s: float
    own: dict[str, float]
    shared: dict[str, float] = {}


class Media(Event, frozen=True):
    """A histogram, an image, a table or a text that the rank reports.

    Attributes:
        name: name that the user chose.
        epoch: epoch of the report; -1 for none.
        step: step of the report; -1 for none.
        time_s: seconds of the run.
        content: the content.
    """

    name: str
    epoch: int
    step: int
    time_s: float
    content: AnyMedia


class Columns(Record, frozen=True):
    """Columns of a report after `PLACE`, in this order.

    Attributes:
        measures: measurements, a subset of `MEASURES`.
        own: metrics of the rank.
        shared: metrics reduced over all ranks, equal on each.
        system: use of the host, a subset of `SYSTEM`. Such rows belong to no step or epoch.
    """

    measures: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    system: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, including `PLACE`."""
        return (*PLACE, *self.measures, *self.own, *self.shared, *self.system)

    def counts(self, is_step: bool) -> bool:
        """Return True if the history of a run contains rows with these columns.

        The history of a step cell contains its steps. The history of a `fit` contains its epochs:
        its measured rows are batches, with running means of the epoch.
        """
        return bool(self.own or self.shared) and (is_step or not self.measures)


class Rows(Event, frozen=True):
    """Many reports of one rank: a table of float64, little-endian, row by row.

    Attributes:
        columns: columns of a row.
        values: shape (rows, len(columns.names)).
        dropped: rows lost since the last message because the buffer was full.
    """

    columns: Columns
    values: bytes
    dropped: int = 0

    def unpacked(self) -> Iterator[Metrics]:
        """Yield the metrics of every row, without the measurements."""
        for values in struct.iter_unpack(self._layout, self.values):
            yield self._metrics(values)

    def last(self) -> Metrics:
        """Return the metrics of the last row. There must be one."""
        offset = len(self.values) - struct.calcsize(self._layout)
        return self._metrics(struct.unpack_from(self._layout, self.values, offset))

    def every(self, stride: int) -> Rows:
        """Return the rows whose step is a multiple of `stride`, and those without a step."""
        if stride == 1:
            return self
        width = struct.calcsize(self._layout)
        rows = (self.values[at : at + width] for at in range(0, len(self.values), width))
        chosen = (row for row in rows if _step_of(row) % stride == 0)
        return msgspec.structs.replace(self, values=b"".join(chosen))

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


def _step_of(row: bytes) -> float:
    """Return the step of a row; 0 if it has none."""
    step: float = struct.unpack_from("<d", row, 8 * PLACE.index("step"))[0]
    return max(0.0, step)


class Rate(Record, frozen=True):
    """A learning rate before `--scale-lr` and after its `warmup_steps`."""

    name: str
    before: float
    after: float
    warmup_steps: int


class StepBegun(Event, frozen=True):
    """A step cell is about to run its first step.

    Attributes:
        replicas: replicas that share a batch.
        batch: samples in the first global batch; 0 if a loop has no batches.
        samples: samples in an epoch; -1 if unknown.
        epochs: epochs of the run; 0 if unknown.
        steps: steps of the run; -1 if unknown.
        sharding: description of how samples are distributed over ranks.
        rates: scaled learning rates.
        changes: names whose values the steps change.
        hyperparameters: name and learning rate of each optimizer that the step reads.
    """

    replicas: int
    batch: int
    samples: int
    epochs: int
    steps: int
    sharding: str
    rates: tuple[Rate, ...]
    changes: tuple[str, ...] = ()
    hyperparameters: dict[str, float | str] = {}


class Planned(Event, frozen=True):
    """The plan of a step, from rank 0.

    Attributes:
        only: nbdist does not run the step.
    """

    plan: Plan
    only: bool = False


class Compiled(Event, frozen=True):
    """Result of the compilation of a step, from rank 0. Bytes are XLA's, on one device.

    Attributes:
        arguments: bytes of the arguments.
        temporaries: bytes of temporaries, if the compiler reports them.
        seconds: duration of the compilation.
    """

    arguments: int
    temporaries: int
    seconds: float


class Opened(Event, frozen=True):
    """The rank saves checkpoints from now on.

    Attributes:
        names: names whose values are saved.
        step: step of the checkpoint that the run resumed; -1 for a new run.
    """

    names: tuple[str, ...]
    step: int = -1


class FitBegun(Event, frozen=True):
    """A Keras `fit` begins.

    Attributes:
        epochs: epochs of the fit.
        steps: steps of all epochs; -1 if unknown.
        hyperparameters: name and learning rate of the optimizer.
        sharding: description of how samples are distributed over ranks; empty if unknown.
    """

    epochs: int
    steps: int
    hyperparameters: dict[str, float | str] = {}
    sharding: str = ""


class Note(Event, frozen=True):
    """A remark about a run. Each rank that observes it sends it once.

    Attributes:
        topic: its subject.
        text: one line.
        warning: the user should act.
    """

    topic: NoteTopic
    text: str
    warning: bool


class Difference(Record, frozen=True):
    """Difference of a value between a step on one replica and on all replicas.

    Attributes:
        name: name of the variable or of the reported scalar.
        shape: shape of the value; empty for a scalar.
        dtype: type of the value.
        largest: largest difference of an element, relative to the largest change.
        tolerance: largest accepted value of `largest`.
        reported: the value is a scalar that the step reports.
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
    """Result of `--check`.

    Attributes:
        rows: samples in the batch.
        replicas: replicas that shared the batch.
        differences: reported scalars, then variables.
        causes: likely causes of the differences; empty if all pass.
    """

    rows: int
    replicas: int
    differences: tuple[Difference, ...]
    causes: tuple[str, ...]


class Operation(Record, frozen=True):
    """Executions of one operation in traced steps.

    Attributes:
        name: the framework's name.
        seconds: seconds of a step in all executions.
        count: mean number of executions in a step.
    """

    name: str
    seconds: float
    count: float


class Profiled(Event, frozen=True):
    """Time of a rank's steps by kind, from a trace of some steps.

    Times are seconds of a step: means over steps and devices that add up to `step_s`. Overlapping
    time counts for the first kind in the order of the attributes.

    Attributes:
        steps: traced steps; 0 if the run ended before the trace.
        step_s: duration of a step.
        compute_s: devices compute.
        collective_s: devices wait in collectives.
        to_device_s: devices wait for copies from the host.
        to_host_s: the host waits for copies from devices.
        top: longest operations. Empty if the framework cannot be traced: `compute_s` is then the
            time outside of collectives and input.
        folder: path of the trace; empty if it was discarded.
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
        """Seconds of a step in Python, input and idle time."""
        known = self.compute_s + self.collective_s + self.to_device_s + self.to_host_s
        return max(0.0, self.step_s - known)


class Failure(Record, frozen=True):
    """An exception of a rank.

    `same` is equal on ranks that raised the same error at the same line. `follows` marks an error
    that the failure of another rank caused.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    same: str
    follows: bool = False


class Replicated(Record, frozen=True):
    """Digests of the values under a name that should be the same on all ranks.

    Attributes:
        name: name in the user's namespace.
        number: digest of all values.
        changed: the cell changed one of the values.
        parts: digest of each value by its path, such as `params['w']`.
    """

    name: str
    number: int
    changed: bool
    parts: dict[str, int] = msgspec.field(default_factory=dict)


class CellEnded(Event, frozen=True):
    """End of the cell on the rank: its last event of the cell.

    Attributes:
        unfinished: steps are still running whose collectives may not end, or collectives failed.
        replicated: digests of the names that a plain cell reads or binds: of replicated arrays
            under pjrt, of mirrored variables under mirrored.
        collective_keys: digest of the keys of this rank's next TensorFlow collectives; 0 without
            TensorFlow. Ranks with different keys cannot meet in a collective.
        generators: digest of the state of each global random generator, by library.
        generator_states: the states, packed by `worker/runtime/rng_alignment.py`; from rank 0 only.
        fits: records of the fits of the cell, packed by `worker/checkpoint/fit_records.py`.
        disk_modules: digest of the file of each module of the user that the rank has imported from
            its host's disk in this cell.
    """

    status: Literal["ok", "error", "interrupted"]
    seconds: float
    failure: Failure | None = None
    unfinished: bool = False
    replicated: tuple[Replicated, ...] = ()
    collective_keys: int = 0
    generators: dict[str, int] = msgspec.field(default_factory=dict)
    generator_states: bytes = b""
    fits: bytes = b""
    disk_modules: dict[str, str] = msgspec.field(default_factory=dict)


class Stopping(Event, frozen=True):
    """Answer to an interrupt of steps: no step after `limit` without a command."""

    limit: int


class Preempted(Event, frozen=True):
    """The process received SIGTERM and ends at the end of the cell."""


class Beat(Event, frozen=True):
    """Heartbeat: the process runs and is in the cell. Sent once a second.

    Attributes:
        step: last step that it started; 0 for none.
        tested: batches of evaluation and prediction so far.
        trained: True between trainings of the cell, when no step is expected.
    """

    step: int
    tested: int
    trained: bool = False


class SystemSample(Event, frozen=True):
    """Use of the host by a rank, from its watchdog.

    Attributes:
        time_s: seconds of the run.
        values: values by the names in `SYSTEM`.
    """

    time_s: float
    values: dict[str, float]


class RankPosition(Event, frozen=True):
    """Position of a rank in its cell, from the watchdog, while the main thread may hang.

    Attributes:
        step: last step that it started; 0 for none.
        place: innermost line of a cell, such as `Cell In[3], line 14`; empty if there is none.
        waits: the main thread waits for another thread, usually one in a collective.
        cpu_s: processor seconds of the main thread.
        stack: stack of the main thread from the cell on, outermost call first; empty while it
            traces the step.
        collective: strategy in whose collective the main thread waits; None for no wait, or if the
            query did not ask.
        under_way: a computation or a collective of this rank is running.
        process_s: processor seconds of the process.
        queued_s: seconds for which its threads waited for a processor, all together.
        clock_s: monotonic clock of the host, in seconds.
        threads: stacks of all Python threads, the main thread first, if the query asked for them.
    """

    step: int
    place: str
    waits: bool
    cpu_s: float
    stack: str
    collective: StrategyName | None = None
    under_way: bool = False
    process_s: float = 0.0
    queued_s: float = 0.0
    clock_s: float = 0.0
    threads: str = ""


AnyEvent = (
    Output
    | Display
    | Metrics
    | Media
    | Rows
    | StepBegun
    | FitBegun
    | Planned
    | Compiled
    | Opened
    | Note
    | Checked
    | Profiled
    | Stopping
    | Preempted
    | CellEnded
    | Beat
    | RankPosition
    | SystemSample
)
"""Union of all events that a rank sends to the kernel."""
