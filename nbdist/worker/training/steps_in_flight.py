"""Steps that have begun, and whose reports this rank has not read yet."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.errors import AnotherRankError, StepError
from nbdist.worker.runtime.signals import NO_SIGNALS
from nbdist.worker.training.trace_schedule import Tracing

if TYPE_CHECKING:
    from nbdist.records import OnNan
    from nbdist.worker.checkpoint.folder import Position
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.runtime.rank_reporter import RankReporter
    from nbdist.worker.runtime.signals import Signals
    from nbdist.worker.training.step_contract import StepStrategy
    from nbdist.worker.training.trace_schedule import Plan

IN_FLIGHT = 2
"""Steps that may be under way before the rank waits for the oldest one's report."""


class _StepInFlight(NamedTuple):
    """A step under way.

    Attributes:
        at: position after the step.
        rows: number of rows of its batch.
        input_s: seconds that the step waited for the batch.
        report: its values.
    """

    at: Position
    rows: int
    input_s: float
    report: Any


class StepsInFlight:
    """Begins steps, waits for their reports, and sends these to the notebook.

    Args:
        reporter: reporter of this rank.
        step_strategy: runs the steps.
        plans: plans of steps to trace.
        on_nan: action on a value that is not finite.

    Attributes:
        tracing: traces some of the steps.
    """

    def __init__(
        self,
        reporter: RankReporter,
        step_strategy: StepStrategy,
        plans: tuple[Plan, ...],
        on_nan: OnNan,
    ) -> None:
        self._reporter = reporter
        self._step_strategy = step_strategy
        self._on_nan = on_nan
        self.tracing = Tracing(step_strategy.tracer, plans, self.read_all)
        self._steps: deque[_StepInFlight] = deque()
        self._not_finite: set[str] = set()
        self._step_ended_at = time.perf_counter()

    def __len__(self) -> int:
        return len(self._steps)

    def restart_clock(self) -> None:
        """Exclude the time before now from the next step."""
        self._step_ended_at = time.perf_counter()

    def begin(self, at: Position, batch: Batch, input_s: float) -> None:
        """Begin the step that ends at position `at`.

        Args:
            at: position after the step.
            batch: batch of the step.
            input_s: seconds that the step waited for the batch.
        """
        self._step_ended_at += self.tracing.before(at.step, at.epoch)
        report = self._step_strategy.step(batch)
        self._steps.append(_StepInFlight(at, batch.rows, input_s, report))

    def read_oldest(self) -> None:
        """Read the oldest report if more than `IN_FLIGHT` steps are under way.

        Raises:
            StepError: a value is not finite; an `AnotherRankError` if another rank has it.
        """
        if len(self._steps) > IN_FLIGHT:
            self._read_oldest()

    def read_all(self) -> None:
        """Read all reports. Raises the errors of `read_oldest`."""
        while self._steps:
            self._read_oldest()

    def report(
        self,
        epoch: int,
        step: int,
        values: dict[str, float],
        measured: dict[str, float],
        signals: Signals = NO_SIGNALS,
    ) -> None:
        """Send the values of a step, or those of an epoch if `step` is -1."""
        own, shared = ({}, values) if self._step_strategy.reduced else (values, {})
        shared = {**shared, **signals.values}
        self._reporter.report_values(epoch, step, own=own, shared=shared, measured=measured)
        signals.send_histograms(self._reporter, epoch, step)

    def _read_oldest(self) -> None:
        at, rows, input_s, report = self._steps.popleft()
        sums = at.sums
        step_result = self._step_strategy.read(report)
        before, self._step_ended_at = self._step_ended_at, time.perf_counter()
        for name, value in step_result.values.items():
            sums[name] = sums.get(name, 0.0) + value * rows
        measured = {
            "step_s": self._step_ended_at - before,
            "input_s": input_s,
            **step_result.measured,
        }
        self.tracing.step_result(at.step, measured)
        self.report(at.epoch, at.step, step_result.values, measured, step_result.signals)
        bad = [name for name, value in step_result.values.items() if not math.isfinite(value)]
        for name in [name for name in bad if name not in self._not_finite]:
            self._not_finite.add(name)
            text = f"`{name}` is {step_result.values[name]} at step {at.step}, epoch {at.epoch}"
            self._reporter.note("nan", text, warning=True)
        if not step_result.finite and self._on_nan == "stop":
            self._stop_not_finite(at.step, bad, step_result.reason)

    def _stop_not_finite(self, step: int, bad: list[str], reason: str) -> None:
        if not bad:
            raise AnotherRankError(
                f"stopped at step {step}: {reason}. Look for a square root of zero or a division "
                "by zero, or lower the learning rate; use --on-nan warn to continue anyway"
            )
        raise StepError(
            f"`{bad[0]}` is not finite at step {step} on rank {self._reporter.rank}: look for a "
            "log of zero or a division by zero, or lower the learning rate; use --on-nan warn to "
            "continue anyway"
        )
