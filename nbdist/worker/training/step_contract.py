"""Contract of a step for both frameworks, and code that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nbdist.errors import StepError
from nbdist.worker.runtime.signals import NO_SIGNALS, Signals

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nbdist.records import Plan, Rate, StepRequest
    from nbdist.worker.checkpoint.saver import State
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.training.parity import Findings


class StepResult(msgspec.Struct, frozen=True):
    """Result of a finished step.

    Attributes:
        values: reported values.
        measured: measurements of the step (`MEASURES`), beside the times of the loop.
        finite: True if all values that decide about continuing are finite; equal on all ranks.
        reason: description of the value that is not finite, if this rank's reports are finite.
        signals: signals of training, equal on all ranks.
    """

    values: dict[str, float]
    finite: bool
    reason: str = ""
    measured: dict[str, float] = {}
    signals: Signals = NO_SIGNALS


class Footprint(msgspec.Struct, frozen=True):
    """Compiler's report about a step: bytes on one device, and seconds of the compilation."""

    arguments: int
    temporaries: int
    seconds: float


class StepStrategy(Protocol):
    """Implementation of a step in one framework.

    Attributes:
        replicas: number of replicas that share a global batch; known after `prepare`.
        shards: number of equal parts in which batches arrive at the devices.
        plan: layout of the step if it is planned; known after `prepare`.
        footprint: footprint of the last compilation; None if the framework does not report it.
        tracer: profiler of the framework.
        changes: names whose values the steps change.
        hyperparameters: name and learning rate of each optimizer that the step reads.
    """

    replicas: int
    shards: int
    plan: Plan | None
    tracer: Tracer

    @property
    def reduced(self) -> bool:
        """True if reports are equal on all ranks."""
        ...

    @property
    def footprint(self) -> Footprint | None: ...

    @property
    def changes(self) -> tuple[str, ...]: ...

    @property
    def hyperparameters(self) -> dict[str, float | str]: ...

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        """Multiply every learning rate by the number of replicas, after `warmup_steps` steps.

        The `made` steps of an earlier run count as warm-up.

        Raises:
            StepError: the step has no learning rate that can be scaled.
        """
        ...

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """Gather int32 numbers, shape `(n,)` to `(ranks, n)`. All ranks must call it."""
        ...

    def check(self, batch: Batch) -> Findings:
        """Compare a step on one replica with one on all; the state does not change."""
        ...

    def layout(self, batch: Batch) -> Plan:
        """Plan the layout of steps with batches like this one, without changing anything.

        Raises:
            PlanError: no layout fits, or the strategy has no planner.
        """
        ...

    def prepare(self, batch: Batch) -> None:
        """Prepare the first step for this batch. Afterwards the state is complete."""
        ...

    def state(self) -> State:
        """Return the state to save in a checkpoint."""
        ...

    def step(self, batch: Batch) -> Any:
        """Begin a step; return its report without waiting for the values."""
        ...

    def read(self, report: Any) -> StepResult:
        """Wait for a report and return its result."""
        ...

    def compilations(self) -> int:
        """Return the number of compilations of the step."""
        ...

    def write_back(self) -> None:
        """Write the carried values into the namespace, after an epoch without steps under way."""
        ...

    def finish(self) -> None:
        """Write the carried values into the namespace, unless that is done already."""
        ...


def function_source(request: StepRequest, parameters: tuple[str, ...]) -> str:
    """Return the step as a function of `parameters`; its header replaces the magic's line."""
    return f"def step({', '.join(parameters)}):\n{request.program.body}"


def named(request: StepRequest, report: Any) -> dict[str, Any]:
    """Return the reported values by name; a single value is named by its expression.

    A step without a report, or whose report is None, reports no values.
    """
    if report is None:
        return {}
    if isinstance(report, dict):
        return dict(report)
    text = request.program.report
    return {text if text.isidentifier() else "value": report}


def scalars(request: StepRequest, report: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the reported values by name, each as a scalar of the framework.

    Raises:
        StepError: a value is not a scalar, or its name is not text.
    """
    values = {}
    for name, value in named(request, report).items():
        if not isinstance(name, str):
            raise StepError(f"the step reports a value under {name!r}: names must be strings")
        if value is None or isinstance(value, (str, bytes, dict, tuple, list, set, complex)):
            raise StepError(f"the step reports `{name}` as {value!r:.60}: report scalars")
        values[name] = convert(value)
        if tuple(values[name].shape):
            shape = tuple(values[name].shape)
            raise StepError(f"the step reports `{name}` of shape {shape}: report scalars")
    return values
