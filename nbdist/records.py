"""Every type that crosses a stage or the wire.

Records that travel over ZeroMQ are tagged msgspec structs: encoded as MessagePack, checked
when decoded. Ranks count from 0; times are seconds, sizes bytes, in the names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Framework = Literal["tensorflow", "jax"]
StrategyName = Literal["mirrored", "pjrt"]
StreamName = Literal["stdout", "stderr"]
Precision = Literal["bfloat16", "float16"]
Communication = Literal["auto", "ring", "nccl"]
OnNan = Literal["stop", "warn"]
MimeBundle = dict[str, object]

RANK_VARIABLE = "NBDIST_RANK"
"""The environment variable that tells an engine its rank."""

BATCH_NAME = "batch"
"""What a step cell calls the element it is given."""

MASK_NAME = "mask"
"""What a step cell calls the positions of the batch that are not padding."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A plain frozen record; never sent over the stream by itself."""


# What a rank says while it runs a cell (engine → kernel).


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whatever rank `rank` says of cell number `cell`; 0 is between cells."""

    rank: int
    cell: int


class Output(Said, frozen=True):
    """Text that the rank wrote: any number of whole or partial lines."""

    stream: StreamName
    text: str


class Display(Said, frozen=True):
    """A rich display, or (with `result`) the value of the cell's last expression."""

    data: MimeBundle
    metadata: MimeBundle
    result: bool = False
    display_id: str = ""
    update: bool = False


class Metrics(Said, frozen=True):
    """Scalars that the rank reports; -1 where an epoch or a step has no meaning.

    `own` are this rank's, `shared` were reduced over all ranks and are the same on each.
    """

    epoch: int
    step: int
    time_s: float
    own: dict[str, float]
    shared: dict[str, float] = {}


class Rate(Record, frozen=True):
    """A learning rate as `--scale-lr` found it, and as it is after `warmup_steps`."""

    name: str
    before: float
    after: float
    warmup_steps: int


class StepBegun(Said, frozen=True):
    """A step cell is about to make its first step.

    Attributes:
        replicas: how many share a batch.
        batch: samples in the first global batch.
        samples: samples in an epoch; -1 where nobody knows.
        epochs: how many there will be.
        steps: steps of the whole run; -1 where nobody knows.
        sharding: how samples come to the ranks, in words.
        rates: learning rates that are scaled.
    """

    replicas: int
    batch: int
    samples: int
    epochs: int
    steps: int
    sharding: str
    rates: tuple[Rate, ...]


class Note(Said, frozen=True):
    """Something about a run that is worth a line: said once, by the ranks that see it.

    Attributes:
        topic: what it is about.
        text: the line.
        warning: whether something should be done.
    """

    topic: Literal["data", "batch", "compiled", "nan", "precision", "check"]
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


class Checked(Said, frozen=True):
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


class CellEnded(Said, frozen=True):
    """The rank is done with the cell: its last record of it."""

    status: Literal["ok", "error", "interrupted"]
    seconds: float
    failure: Failure | None = None


class Stopping(Said, frozen=True):
    """A step cell was interrupted: the rank makes no step beyond `limit` until it is answered."""

    limit: int


Speech = Output | Display | Metrics | StepBegun | Note | Checked | Stopping | CellEnded


# What a cell is (kernel → engine).


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


class StepRequest(Record, frozen=True):
    """A step and how it is to be run."""

    program: StepProgram
    options: StepOptions


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank is sent of cell number `number`; they count from 1 within the cluster."""

    number: int


class StopAfter(Order, frozen=True):
    """The last step that ranks make of an interrupted step cell."""

    step: int


class CellRequest(Order, frozen=True):
    """A cell to run once on each rank, or, with `step`, once for each batch.

    Attributes:
        source: the code, with as many lines before it as it has in the notebook.
        label: the notebook's own execution count, for tracebacks.
        strategy: the strategy whose scope the cell runs in, if any.
        awaits: the cell uses `await` at top level.
        precision: what Keras's layers compute in; None leaves it to them.
    """

    source: str
    label: int
    strategy: StrategyName | None
    awaits: bool
    precision: Precision | None = None
    step: StepRequest | None = None


# How a cluster is made.


class ClusterRequest(Record, frozen=True):
    """A local cluster as asked for.

    Attributes:
        hosts: number of engines, one for each host.
        frameworks: what the engines load.
        devices_per_host: virtual CPU devices under JAX, or GPUs given to each engine;
            0 leaves it to what is there.
        cpus_per_worker: cores that each engine may use; 0 is no limit.
        env: further environment of every engine.
        communication: how TensorFlow's collectives are made.
    """

    hosts: int
    frameworks: tuple[Framework, ...]
    devices_per_host: int = 0
    cpus_per_worker: int = 0
    env: dict[str, str] = {}
    communication: Communication = "auto"


class Phase(Record, frozen=True):
    """One phase of a start, done after `seconds`."""

    name: str
    seconds: float
    detail: str = ""


class SocketAddress(Record, frozen=True):
    """A socket of the notebook's that engines connect to; `server_key` is its CURVE key (Z85)."""

    url: str
    server_key: bytes


class WorkerIdentity(Record, frozen=True):
    """A rank as it is told who it is, where it speaks to and where its cells come from."""

    rank: int
    world_size: int
    stream: SocketAddress
    dispatch: SocketAddress


class WorkerHello(Record, frozen=True):
    """The first answer of an engine."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]


class Device(Record, frozen=True):
    """A device that a rank drives, as its framework names it."""

    platform: str
    kind: str
    name: str
    memory_bytes: int | None = None


class WorkerState(Record, frozen=True):
    """A rank, as `%dist_status` shows it."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]
    devices: tuple[Device, ...]
    state: str = "idle"
    memory_bytes: int = 0

    @property
    def where(self) -> str:
        """`rank@host`, as it labels output."""
        return f"{self.rank}@{self.host}"


class MirroredWiring(Record, frozen=True):
    """What one rank needs to build MultiWorkerMirroredStrategy."""

    tf_config: str
    communication: Communication


class PjrtWiring(Record, frozen=True):
    """What one rank needs to join the JAX processes.

    Attributes:
        address: host:port of the coordination service, which no rank hosts.
        cpu_devices: virtual CPU devices of this rank; 0 leaves it to JAX.
    """

    address: str
    rank: int
    world_size: int
    cpu_devices: int
