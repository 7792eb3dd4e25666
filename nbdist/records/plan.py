"""A plan: how a step is laid out over devices, and what that is expected to cost."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from nbdist.records.base import Record
from nbdist.records.options import Option

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the mesh axes that it is cut over, the outer one first."""

Zero = Literal[0, 1, 3]
"""What is cut over the data axis beside the batch: nothing; the optimizer's state (ZeRO-1);
parameters too (ZeRO-3, fully sharded)."""


Schedule = Literal["gpipe", "1f1b"]
"""The order in which microbatches go through the stages of a pipeline: all there, then all back
(GPipe); each back as soon as it has come through (1F1B)."""

Remat = Literal["", "selective", "full"]
"""What the backward pass makes again, in place of keeping it: nothing; all but what products and
convolutions with parameters make; all but what goes from one stretch of layers into the next."""


class PlannedTensor(Record, frozen=True):
    """An array that the step is given.

    Attributes:
        path: the expression that leads to it.
        role: `parameter`, `state` (an optimizer's, a counter), `read` or `batch`.
        spec: one entry for each dimension.
        device_bytes: on each device.
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
        arguments: of what the step is given: exact.
        gradients: what is made anew beside parameters, before it takes their place.
        activations: what the step keeps on its way, at most.
        margin: for fragments and the runtime's own.
        available: on a device.
    """

    arguments: int
    gradients: int
    activations: int
    margin: int
    available: int

    @property
    def needed(self) -> int:
        """Without the margin."""
        return self.arguments + self.gradients + self.activations

    @property
    def total(self) -> int:
        return self.needed + self.margin


class Traffic(Record, frozen=True):
    """What a step sends along one mesh axis.

    Attributes:
        axis: of the mesh.
        level: the name of the slowest links that it crosses.
        bytes: sent by each device.
        seconds: that it takes, overlapped or not.
    """

    axis: str
    level: str
    bytes: float
    seconds: float


class PlannedTime(Record, frozen=True):
    """Seconds of one step.

    Attributes:
        compute: of the operations.
        exposed: of collectives that nothing hides.
        traffic: of all collectives, by level.
        mfu: model FLOPs utilisation: the step's operations over what the devices could do.
        bubble: of the step, the share in which a stage waits for microbatches.
    """

    compute: float
    exposed: float
    traffic: tuple[Traffic, ...]
    mfu: float
    bubble: float = 0.0

    @property
    def step(self) -> float:
        return self.compute + self.exposed


class Collective(Record, frozen=True):
    """The collectives of one kind in a compiled program, each loop once.

    Attributes:
        kind: XLA's word, as `all-reduce`.
        bytes: of their results on each device.
    """

    kind: str
    count: int
    bytes: int


class Verified(Record, frozen=True):
    """What XLA's compiler for the hardware says of a plan. Bytes are those of one device.

    Attributes:
        arguments: of what the step is given, as they lie in this device's memory.
        temporaries: of what it makes on its way.
        total: of all, code too; what is given back takes the place of what was given.
        seconds: that it took to compile.
    """

    arguments: int
    temporaries: int
    total: int
    collectives: tuple[Collective, ...]
    seconds: float


class RunnerUp(Record, frozen=True):
    """A plan that was not chosen, and why.

    Attributes:
        compiled_bytes: what it takes of each device, as the hardware's compiler says; 0 where that
            was not asked, or refuses it.
    """

    title: str
    step_s: float
    device_bytes: int
    why: str
    compiled_bytes: int = 0


class Staging(NamedTuple):
    """How microbatches go through stages; attributes as a plan's."""

    schedule: Schedule = "gpipe"
    rounds: int = 1


GPIPE = Staging()
"""All of them once there, and then all back."""


class Plan(Record, frozen=True):
    """How a step is laid out.

    Attributes:
        axes: of the mesh, outermost first.
        zero: what is cut over the data axis beside the batch.
        rows: in the global batch that it was made for.
        on: the hardware in words.
        notes: what could not be looked into, and what was assumed.
        verified: by the hardware's compiler; None where it was not asked.
        remat: which activations are made again.
        micro: in how many parts each device goes through its part of the batch; with stages, in how
            many microbatches that goes through them.
        sequence: whether the axis `model` cuts what products pass on along the sequence.
        schedule: with stages, the order in which microbatches go through them.
        rounds: with stages, how often they do: each has as many blocks of layers (interleaved).
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

    @property
    def staging(self) -> Staging:
        return Staging(self.schedule, self.rounds)

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def title(self) -> str:
        """As in `data 4 x tensor 2 x 4 stages, ZeRO-1, 16 microbatches, full remat`."""
        return title_of(self)


class _Degrees(Protocol):
    """What a layout is told by; attributes as a plan's."""

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


def title_of(layout: _Degrees) -> str:
    """A layout in a few words."""
    axes, words = layout.axes, {DATA: "data", MODEL: "tensor"}
    stages = axes.get(STAGE, 1)
    parts = [f"{words[axis]} {size}" for axis, size in axes.items() if axis in words and size > 1]
    parts += [f"{stages} stages"] * (stages > 1)
    more = ["sequence parallel"] * layout.sequence + [f"ZeRO-{layout.zero}"] * bool(layout.zero)
    more += ["1F1B"] * (layout.schedule == "1f1b" and stages > 1)
    more += [f"{layout.rounds} rounds"] * (layout.rounds > 1)
    more += [f"{layout.micro} microbatches"] * (layout.micro > 1)
    more += [f"{layout.remat} remat"] * bool(layout.remat)
    return ", ".join([" x ".join(parts or ["one device"]), *more])


class Planning(Record, frozen=True):
    """Constraints on a plan.

    Attributes:
        budget: bytes on each device; 0 for all memory.
        fixed: sizes of axes, `zero`, `micro`, `rounds` and `sequence` (0 or 1).
        remat: activations to recompute; None leaves it open.
        schedule: order of microbatches in a pipeline; None leaves it open.
        given: a plan to use as it is.
        on: hardware to plan for in place of the devices of the cluster.
        verify: ask the compiler of the hardware too.
        only: plan, and run nothing.
    """

    given: Annotated[
        Plan | None,
        Option(
            flags=("--plan",),
            metavar="FILE",
            help="Use the layout in this file, under pjrt.",
            details="A run stores its plan in `plan.json`.",
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
            "`tensor` and `stage` are sizes of mesh axes, `zero` is 0, 1 or 3. `micro=4` cuts a "
            "batch into microbatches. `stage=4` runs the layers of a scan as a pipeline; "
            "`schedule=1f1b` keeps few microbatches, and `rounds=2` interleaves stages. "
            "`sequence=1` adds sequence parallelism to `tensor`. `remat=full` recomputes "
            "activations. See [the planner](planner.md).",
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
            details="See [the planner](planner.md).",
        ),
    ] = ""
    verify: Annotated[
        bool, Option(help="Compile the step with the compiler of the hardware too.")
    ] = False
    only: bool = False


DATA, MODEL, STAGE = "data", "model", "stage"
"""The mesh's axes: the batch is cut over the first, what the model is made of over the second, and
its layers over the third."""
