"""The loop of a step cell on one rank: nothing of a step passes through the notebook."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.errors import StepError
from nbdist.worker.data import Cut, open_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StepRequest
    from nbdist.worker.data import Batch, Source
    from nbdist.worker.state import Worker

IN_FLIGHT = 2
"""Steps that may be under way before the oldest one's report is read, and so waited for."""


class Stepper(Protocol):
    """One framework's way to make a step.

    Attributes:
        replicas: how many replicas share a global batch.
        reduced: whether reports are the same on all ranks.
    """

    replicas: int
    reduced: bool

    def step(self, batch: Batch) -> Any:
        """Begin a step; returns its report, which may not be there yet."""
        ...

    def read(self, report: Any) -> dict[str, float]:
        """Wait for a report."""
        ...

    def finish(self) -> None:
        """Put what was carried back into the namespace."""
        ...


def check_names(request: StepRequest, namespace: dict[str, Any]) -> None:
    """Raises StepError, with the line, for names that the step needs and the rank lacks."""
    needed = {**request.program.reads, **request.program.carried_lines}
    missing = [f"`{n}` (line {line})" for n, line in needed.items() if n not in namespace]
    if request.options.data not in namespace:
        missing.append(f"`{request.options.data}` (--data)")
    if missing:
        raise StepError(f"not defined on the workers: {', '.join(missing)}")


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
    values = {name: convert(value) for name, value in named(request, report).items()}
    for name, value in values.items():
        if tuple(value.shape):
            raise StepError(
                f"the step reports `{name}` of shape {tuple(value.shape)}: report scalars"
            )
    return values


def run(worker: Worker, request: StepRequest, namespace: dict[str, Any], stepper: Stepper) -> None:
    """Go through the data, and report every step and every epoch.

    Raises:
        StepError: the data are no data set, or empty.
    """
    options = request.options
    source = open_source(
        options.data, namespace[options.data], options.batch, options.shuffle, options.epochs
    )
    cut = Cut(rank=worker.rank, ranks=worker.world_size, replicas=stepper.replicas)
    loop = _Loop(worker, options.steps, stepper, cut)
    try:
        for number in range(1, options.epochs + 1):
            if not loop.epoch(number, source):
                break
    finally:
        stepper.finish()


class _Loop:
    def __init__(self, worker: Worker, limit: int, stepper: Stepper, cut: Cut) -> None:
        self._worker = worker
        self._stepper = stepper
        self._cut = cut
        self._left = limit or -1
        self._step = 0
        self._flying: deque[tuple[int, int, Any]] = deque()

    def epoch(self, number: int, source: Source) -> bool:
        """Make an epoch's steps; False once there is no step left to make."""
        sums: dict[str, float] = {}
        rows = 0
        for batch in source.epoch(number, self._cut):
            if self._left == 0:
                break
            self._left -= 1
            self._step += 1
            rows += batch.rows
            self._flying.append((self._step, batch.rows, self._stepper.step(batch)))
            if len(self._flying) > IN_FLIGHT:
                self._land(number, sums)
        while self._flying:
            self._land(number, sums)
        if not rows:
            raise StepError(f"epoch {number} had no batch: the data are empty")
        self._say(number, -1, {name: total / rows for name, total in sums.items()})
        return self._left != 0

    def _land(self, epoch: int, sums: dict[str, float]) -> None:
        step, rows, report = self._flying.popleft()
        values = self._stepper.read(report)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * rows
        self._say(epoch, step, values)

    def _say(self, epoch: int, step: int, values: dict[str, float]) -> None:
        own, shared = ({}, values) if self._stepper.reduced else (values, {})
        self._worker.report_values(epoch, step, own=own, shared=shared)
