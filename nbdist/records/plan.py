"""Plans: the layout of a step over devices, and its expected cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

import msgspec

from nbdist.records.base import Record, ResultRow
from nbdist.records.options import Option

if TYPE_CHECKING:
    from collections.abc import Mapping

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of each dimension of an array, outermost first."""

Zero = Literal[0, 1, 3]
"""ZeRO stage. Over the data axis, 0 shards the batch, 1 optimizer state too, 3 parameters too."""


Schedule = Literal["gpipe", "1f1b"]
"""Pipeline schedule: all forward passes before all backward passes (GPipe), or 1F1B."""

LossStages = Literal["all", "last"]
"""Stages that compute the loss: all, each for its own rows, or the last one for all rows."""

Remat = Literal["", "selective", "full"]
"""Activations that the backward pass recomputes.

Empty: none. `selective`: all but the results of matrix products and convolutions with parameters.
`full`: all but the inputs of each segment of layers."""


class PlannedTensor(ResultRow, frozen=True):
    """An argument array of the step.

    Attributes:
        path: expression of its access path.
        role: `parameter`, `state` (of an optimizer, a counter), `read` or `batch`.
        spec: mesh axes of each dimension.
        device_bytes: bytes on each device.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    device_bytes: int


class PlannedMemory(Record, frozen=True):
    """Bytes on each device.

    Attributes:
        arguments: arguments of the step, exact.
        gradients: gradients and new values of parameters.
        activations: peak of the activations.
        margin: reserve for fragmentation and the runtime.
        available: memory of a device.
    """

    arguments: int
    gradients: int
    activations: int
    margin: int
    available: int

    @property
    def needed(self) -> int:
        """Bytes without the margin."""
        return self.arguments + self.gradients + self.activations

    @property
    def total(self) -> int:
        return self.needed + self.margin

    @property
    def free(self) -> int:
        """Bytes that stay free; negative if the plan does not fit."""
        return self.available - self.total


class Traffic(Record, frozen=True):
    """Traffic of a step along one mesh axis.

    Attributes:
        axis: mesh axis.
        level: name of the slowest links on the way.
        bytes: bytes sent by each device.
        seconds: duration, overlapped or not.
        hidden: seconds that overlap with operations.
    """

    axis: str
    level: str
    bytes: float
    seconds: float
    hidden: float = 0.0


class PlannedTime(Record, frozen=True):
    """Seconds of one step.

    Attributes:
        compute: seconds of operations.
        exposed: seconds of collectives that do not overlap with computing.
        traffic: traffic of all collectives, by level.
        mfu: model FLOPs utilisation, from 0 to 1.
        bubble: share of the step in which a stage waits for microbatches, from 0 to 1.
        flops: operations of the model's products and convolutions on each device.
    """

    compute: float
    exposed: float
    traffic: tuple[Traffic, ...]
    mfu: float
    bubble: float = 0.0
    flops: float = 0.0

    @property
    def step(self) -> float:
        return self.compute + self.exposed


class Collective(Record, frozen=True):
    """Collectives of one kind in a compiled program. Loop bodies count once.

    Attributes:
        kind: name in HLO, such as `all-reduce`.
        count: number of collectives.
        bytes: bytes of their results on each device.
    """

    kind: str
    count: int
    bytes: int


class Verified(Record, frozen=True):
    """Result of XLA's compiler for the hardware of a plan. Bytes are those of one device.

    Attributes:
        arguments: bytes of the arguments in the device's memory layout.
        temporaries: bytes of temporaries.
        total: bytes of all, including code. Donated arguments and results share memory.
        collectives: collectives by kind.
        seconds: duration of the compilation.
    """

    arguments: int
    temporaries: int
    total: int
    collectives: tuple[Collective, ...]
    seconds: float


class RunnerUp(Record, frozen=True):
    """A plan that was not chosen, and the reason.

    Attributes:
        compiled_bytes: bytes of each device by the hardware's compiler; 0 if it did not compile the
            plan.
    """

    title: str
    step_s: float
    device_bytes: int
    why: str
    compiled_bytes: int = 0


class Staging(NamedTuple):
    """Pipeline schedule. The attributes are those of `Plan`."""

    schedule: Schedule = "gpipe"
    rounds: int = 1
    loss_stages: LossStages = "all"


GPIPE = Staging()
"""GPipe with one block of layers in each stage."""


class Plan(Record, frozen=True):
    """Layout of a step.

    Attributes:
        axes: size of each mesh axis, outermost first.
        zero: ZeRO stage.
        rows: samples in the global batch of the plan.
        on: description of the hardware.
        notes: operations that could not be analysed, and assumptions.
        verified: result of the hardware's compiler; None if it was not used.
        remat: recomputed activations.
        micro: microbatches of each device's part of the batch.
        sequence: sequence parallelism along the axis `model`.
        schedule: pipeline schedule, if there are stages.
        rounds: blocks of layers in each stage (interleaving).
        loss_stages: stages that compute the loss; with `last`, no rows leave the last stage for it.
        kernels: True if the step has Pallas kernels, which run on the shards of each device.
    """

    axes: dict[str, int]
    zero: Zero
    rows: int
    on: str
    tensors: tuple[PlannedTensor, ...]
    memory: PlannedMemory
    time: PlannedTime
    warnings: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()
    verified: Verified | None = None
    remat: Remat = ""
    micro: int = 1
    sequence: bool = False
    schedule: Schedule = "gpipe"
    rounds: int = 1
    loss_stages: LossStages = "all"
    kernels: bool = False

    @property
    def staging(self) -> Staging:
        return Staging(self.schedule, self.rounds, self.loss_stages)

    @property
    def sums_once(self) -> bool:
        """True if sums over microbatches may be added over `data` once a step, at the end."""
        return sums_once(self)

    @property
    def replicas(self) -> int:
        """Number of replicas that share the batch."""
        return replicas_of(self.axes)

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def title(self) -> str:
        """Short form: `data 4 x tensor 2 x 4 stages, ZeRO-1, 16 microbatches, full remat`."""
        return title_of(self)


class _Degrees(Protocol):
    """The degrees of a layout. The attributes are those of `Plan`."""

    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def zero(self) -> Zero: ...
    @property
    def micro(self) -> int: ...
    @property
    def remat(self) -> Remat: ...
    @property
    def sequence(self) -> bool: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def rounds(self) -> int: ...
    @property
    def loss_stages(self) -> LossStages: ...


def sums_once(layout: _Degrees) -> bool:
    """Return True if each place of `data` may keep its own sums until the last microbatch.

    Under ZeRO-3, the sums of each microbatch are scattered, because whole sums would take the
    memory that ZeRO-3 saves. A pipeline has its own sums.
    """
    has_stages = layout.axes.get(STAGE, 1) > 1
    is_shared = replicas_of(layout.axes) > 1
    return layout.micro > 1 and is_shared and layout.zero != 3 and not has_stages


def replicas_of(axes: Mapping[str, int]) -> int:
    """Return the number of replicas that share the batch, from the sizes of mesh axes."""
    return axes.get(REPLICATE, 1) * axes[DATA]


def batch_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that shard the batch, outermost first, from the sizes of mesh axes."""
    return tuple(axis for axis in BATCH_AXES if axis in axes)


def title_of(layout: _Degrees) -> str:
    """Return the short form of a layout."""
    axes, words = layout.axes, {REPLICATE: "replicate", DATA: "data", MODEL: "tensor"}
    stages = axes.get(STAGE, 1)
    parts = [f"{words[axis]} {size}" for axis, size in axes.items() if axis in words and size > 1]
    parts += [f"{stages} stages"] * (stages > 1)
    more = ["sequence parallel"] * layout.sequence + [f"ZeRO-{layout.zero}"] * bool(layout.zero)
    more += ["1F1B"] * (layout.schedule == "1f1b" and stages > 1)
    more += [f"{layout.rounds} rounds"] * (layout.rounds > 1)
    more += [f"{layout.micro} microbatches"] * (layout.micro > 1)
    more += ["loss on the last stage"] * (layout.loss_stages == "last")
    more += [f"{layout.remat} remat"] * bool(layout.remat)
    return ", ".join([" x ".join(parts or ["one device"]), *more])


class Planning(Record, frozen=True):
    """A request to the planner.

    Attributes:
        budget: bytes to use on each device; 0 for all.
        fixed: fixed sizes of axes, `zero`, `micro`, `rounds` and `sequence` (0 or 1).
        remat: recomputed activations; None for the planner's choice.
        schedule: pipeline schedule; None for the planner's choice.
        given: plan to use unchanged.
        on: other hardware to plan for. nbdist does not run the step then.
        only: plan without a run.
        verify: compile the plan with the hardware's compiler.
    """

    given: Annotated[
        Plan | None,
        Option(
            flags=("--plan",),
            metavar="FILE",
            help="Use the layout in this file, under pjrt.",
            details="A run stores its plan in `plan.json`. An edited copy may set axes, `zero`, "
            "`remat`, `micro`, `schedule`, `rounds`, `loss_stages`, `sequence` and specs. The spec "
            "of the batch stays, because the batch is always sharded over all devices.",
        ),
    ] = None
    budget: Annotated[
        int,
        Option(
            kind="text",
            metavar="40GB",
            default="all memory",
            help="Memory that a plan may use on each device.",
        ),
    ] = 0
    fixed: Annotated[
        dict[str, int],
        Option(
            flags=("--fix",),
            metavar="tensor=2,zero=3",
            help="Fixed parts of the layout: data, tensor, stage, zero, remat, micro and others.",
            details="The layout is that of a step, or of the `fit` in a cell, under pjrt. `data`, "
            "`tensor`, `stage` and `replicate` are sizes of mesh axes, `zero` is 0, 1 or 3. "
            "`replicate=2` keeps two copies of what ZeRO shards. `micro=4` splits a batch into "
            "microbatches. `stage=4` runs the layers of a scan as a pipeline. "
            "`schedule` is `gpipe` or `1f1b`, which keeps few microbatches, and `rounds=2` "
            "interleaves stages. `sequence=1` adds sequence parallelism to `tensor`, and "
            "`sequence=0` excludes it. `remat=full` and `remat=selective` recompute activations; "
            "`remat=none` recomputes none. See [the planner](planner.md).",
        ),
    ] = msgspec.field(default_factory=dict)
    remat: Remat | None = None
    schedule: Schedule | None = None
    on: Annotated[
        str,
        Option(
            metavar="HARDWARE",
            default="the devices of the cluster",
            help="Hardware to plan for: 32xH100, v5e:16x16, or the path of a file.",
            details="Another example is `4 hosts x 8 A100, 25 Gbps`. A file is TOML or JSON. See "
            "[the planner](planner.md).",
        ),
    ] = ""
    verify: Annotated[
        bool,
        Option(
            help="Compile the step with the compiler of the hardware too.",
            details="See [compiled plans](planner.md#compiled-plans).",
        ),
    ] = False
    only: bool = False


DATA, MODEL, STAGE = "data", "model", "stage"
"""Mesh axes of the batch, of parameters, and of layers."""

REPLICATE = "replicate"
"""Mesh axis of the batch over which ZeRO shards nothing (hybrid sharding, HSDP)."""

BATCH_AXES = (REPLICATE, DATA)
"""Mesh axes that shard the batch, outermost first."""
