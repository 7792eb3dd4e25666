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
MimeBundle = dict[str, object]

RANK_VARIABLE = "NBDIST_RANK"
"""The environment variable that tells an engine its rank."""

BATCH_NAME = "batch"
"""What a step cell calls the element it is given."""


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


class Failure(Record, frozen=True):
    """An exception as it looked on its rank.

    `same` is equal on ranks that raised for the same reason at the same line.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    same: str


class CellEnded(Said, frozen=True):
    """The rank is done with the cell: its last record of it."""

    status: Literal["ok", "error", "interrupted"]
    seconds: float
    failure: Failure | None = None


Speech = Output | Display | Metrics | CellEnded


# What a cell is (kernel → engine).


class StepProgram(Record, frozen=True):
    """A cell as the body of a step; lines count from 1, the magic's own.

    Attributes:
        body: the function's lines from the second on; it returns (report, carried values).
        reads: names that it takes from the namespace, with the line of their first use.
        carried: names that it reads and then assigns.
        carried_lines: the first line of each.
        report: the text of the expression that it reports.
    """

    body: str
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
    """

    data: str
    epochs: int = 1
    batch: int = 0
    shuffle: int | None = None
    steps: int = 0


class StepRequest(Record, frozen=True):
    """A step and how it is to be run."""

    program: StepProgram
    options: StepOptions


class CellRequest(Record, frozen=True):
    """A cell to run once on each rank, or, with `step`, once for each batch.

    Attributes:
        number: the cell's number within the cluster; counts from 1.
        source: the code, with as many lines before it as it has in the notebook.
        label: the notebook's own execution count, for tracebacks.
        strategy: the strategy whose scope the cell runs in, if any.
        awaits: the cell uses `await` at top level.
    """

    number: int
    source: str
    label: int
    strategy: StrategyName | None
    awaits: bool
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
    """

    hosts: int
    frameworks: tuple[Framework, ...]
    devices_per_host: int = 0
    cpus_per_worker: int = 0
    env: dict[str, str] = {}


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
