"""What makes the steps: one contract for both frameworks, and what they do alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nbdist.records import Plan, Rate, StepRequest
    from nbdist.worker.checkpoint.saver import State
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.training.parity import Findings


class StepResult(msgspec.Struct, frozen=True):
    """A step that is done.

    Attributes:
        values: what it reported.
        measured: what was measured of it, of `MEASURES`, beside the times of the loop.
        finite: whether all is finite that decides over going on; the same on all ranks.
        reason: what is not, where this rank's own values are.
    """

    values: dict[str, float]
    finite: bool
    reason: str = ""
    measured: dict[str, float] = {}


class Footprint(msgspec.Struct, frozen=True):
    """What a compiler says of a step: bytes on one device, and how long it took."""

    arguments: int
    temporaries: int
    seconds: float


class StepStrategy(Protocol):
    """One framework's way to make a step.

    Attributes:
        replicas: how many replicas share a global batch; known once `prepare` is done.
        shards: in how many parts of equal size batches come to the devices.
        plan: how the step is laid out, where that is planned; known then too.
        footprint: of what was compiled last, where the framework tells.
        reduced: whether reports are the same on all ranks.
        tracer: the framework's profiler.
        changes: names whose values the steps change.
    """

    replicas: int
    shards: int
    plan: Plan | None
    footprint: Footprint | None
    reduced: bool
    tracer: Tracer

    @property
    def changes(self) -> tuple[str, ...]: ...

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        """Multiply every learning rate by the number of replicas, from `warmup_steps` on.

        Steps that were `made` before count.

        Raises:
            StepError: there is none that can be.
        """
        ...

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """Every rank's int32 numbers: from shape (n,) to shape (ranks, n); all have to call it."""
        ...

    def check(self, batch: Batch) -> Findings:
        """Compare a step on one replica with one on all; the state stays as it is."""
        ...

    def layout(self, batch: Batch) -> Plan:
        """How steps with batches like this one are laid out; nothing is changed.

        Raises:
            PlanError: they fit in no way, or nobody plans under this strategy.
        """
        ...

    def prepare(self, batch: Batch) -> None:
        """Before the first step, which has this batch: from here on the state is complete."""
        ...

    def state(self) -> State:
        """What a checkpoint has of it."""
        ...

    def step(self, batch: Batch) -> Any:
        """Begin a step; returns its report, which may not be there yet."""
        ...

    def read(self, report: Any) -> StepResult:
        """Wait for a report."""
        ...

    def compilations(self) -> int:
        """How often the step has been compiled."""
        ...

    def write_back(self) -> None:
        """An epoch is over, and no step under way: put what is carried into the namespace."""
        ...

    def finish(self) -> None:
        """Put what was carried back into the namespace, unless that has been done."""
        ...


def function_source(request: StepRequest, parameters: tuple[str, ...]) -> str:
    """The step as a function of `parameters`; its head stands on the magic's own line."""
    return f"def step({', '.join(parameters)}):\n{request.program.body}"


def named(request: StepRequest, report: Any) -> dict[str, Any]:
    """What the step reports, by name: a dict as it is, else the expression's own name."""
    if isinstance(report, dict):
        return dict(report)
    text = request.program.report
    return {text if text.isidentifier() else "value": report}


def scalars(request: StepRequest, report: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """What the step reports, by name, each as a scalar of the framework's.

    Raises:
        StepError: a value is none; its name and shape are said.
    """
    values = {}
    for name, value in named(request, report).items():
        if not isinstance(name, str):
            raise StepError(f"the step reports a value under {name!r}: names are text")
        if value is None or isinstance(value, (str, bytes, dict, tuple, list, set, complex)):
            raise StepError(f"the step reports `{name}` as {value!r:.60}: report scalars")
        values[name] = convert(value)
        if tuple(values[name].shape):
            shape = tuple(values[name].shape)
            raise StepError(f"the step reports `{name}` of shape {shape}: report scalars")
    return values
