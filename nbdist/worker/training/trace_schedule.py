"""Schedule of traces: some steps at intervals, to measure the time in JAX's collectives.

JAX's programs do not time themselves, and its profiler costs little: 3 ms to start and stop, and
0.3 ms for each traced step. All ranks trace at the same times of the run and thus, with few
exceptions, the same steps. They exchange nothing for that.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Protocol

from nbdist.worker.profiling.trace import collective_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.runtime.rank_reporter import RankReporter

SAMPLED_STEPS = 4
SHARE = 0.005
"""Largest share of the run's time that samples may cost."""

GAP_S = 4.0
"""Seconds between samples; doubled while a sample costs more than its `SHARE`."""

LONGEST_STRIDE = 128
"""Largest stride. Samples begin at multiples of a stride that grows with the step number.

The clocks of the ranks differ by some milliseconds. A stride lets them begin at the same step, most
of the time.
"""

_SETTLED_STEP = 4
"""Last step that restarts the clock. All ranks have then waited for the compiled first step."""

_READING_S = 60.0
"""Seconds that the end of a run waits for a trace to be read."""


class Plan(Protocol):
    """A plan to trace some steps.

    Attributes:
        steps: number of steps in a trace.
    """

    steps: int

    def is_due(self, step: int) -> bool:
        """Return True if to begin a trace before `step`; called before each step."""
        ...

    def folder(self) -> Path:
        """Return the folder of the next trace."""
        ...

    def done(self, cost_s: float) -> None:
        """Note a finished trace. It cost `cost_s` seconds beside the steps."""
        ...

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        """Report the traced steps with the loop's measurements, on a thread of its own."""
        ...

    def close(self) -> None:
        """End the plan: no more steps follow."""
        ...


class Samples:
    """A plan to trace a few steps at intervals, and report their time in collectives.

    Args:
        reporter: reporter of this rank.
        tracer: profiler of the framework.
        each: number of reported steps in one traced step.
    """

    steps = SAMPLED_STEPS

    def __init__(self, reporter: RankReporter, tracer: Tracer, each: int = 1) -> None:
        self._reporter = reporter
        self._tracer = tracer
        self._each = each
        self._began = 0.0
        self._gap_s = GAP_S
        self._next_s = GAP_S

    def is_due(self, step: int) -> bool:
        if step <= _SETTLED_STEP:
            self._began = time.perf_counter()
        stride = min(LONGEST_STRIDE, max(1, 1 << step.bit_length() >> 5))
        return step % stride == 0 and time.perf_counter() - self._began >= self._next_s

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="nbdist-trace-"))

    def done(self, cost_s: float) -> None:
        """Set the next sample to a multiple of the gap; ranks with different gaps share some."""
        while cost_s > self._gap_s * SHARE:
            self._gap_s *= 2
        passed = time.perf_counter() - self._began
        self._next_s = (passed // self._gap_s + 1) * self._gap_s

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        """Report the mean time of the steps, together with the time of each in collectives.

        The rank waits for all steps before and after a trace, so only the mean is right: the first
        of them are read when several have ended. An incomplete trace, at the end of the run, is
        skipped.
        """
        try:
            if len(measured) < self.steps:
                return
            spent = collective_seconds(self._tracer.read(folder), len(measured))
        finally:
            shutil.rmtree(folder)
        step_s = mean(times["step_s"] for times in measured.values())
        for step, collective_s in zip(measured, spent, strict=True):
            more = {"step_s": step_s, "collective_s": collective_s / self._each}
            self._reporter.report_values(epoch, step, own={}, shared={}, measured=more)

    def close(self) -> None:
        pass


class Tracing:
    """Starts and stops the profiler between steps.

    Args:
        tracer: profiler of the framework.
        plans: plans of traces; one trace runs at a time, of the first plan that is due.
        settle: waits for the steps under way.
    """

    def __init__(self, tracer: Tracer, plans: tuple[Plan, ...], settle: Callable[[], None]) -> None:
        self._tracer = tracer
        self._plans = plans
        self._settle = settle
        self._open: Plan | None = None
        self._reading: list[threading.Thread] = []
        self._measured: dict[int, dict[str, float]] = {}

    def step_result(self, step: int, measured: dict[str, float]) -> None:
        """Record the measurements of a finished step. Call it for each step."""
        if self._open is not None:
            self._measured[step] = measured

    def before(self, step: int, epoch: int) -> float:
        """Start or stop a trace if due; return the seconds it took. Call it before each step."""
        if self._open is not None:
            ends = step >= self._first + self._open.steps
            return self._stop(self._open, epoch) if ends else 0.0
        for plan in self._plans:
            if plan.is_due(step):
                return self._start(plan, step)
        return 0.0

    def stop(self, epoch: int) -> None:
        """Stop a trace under way. Call it before work outside steps."""
        if self._open is not None:
            self._stop(self._open, epoch)

    def close(self, epoch: int) -> None:
        """Stop a trace under way, and wait until all traces have been reported."""
        if self._open is not None:
            self._end(self._open, epoch)
        for reading in self._reading:
            reading.join(_READING_S)
        for plan in self._plans:
            plan.close()

    def _start(self, plan: Plan, step: int) -> float:
        self._settle()
        began = time.perf_counter()
        folder = plan.folder()
        if self._tracer.start(folder):
            self._open, self._first, self._folder, self._measured = plan, step, folder, {}
            self._start_s = time.perf_counter() - began
            return self._start_s
        with contextlib.suppress(OSError):  # the folder may contain earlier traces
            folder.rmdir()
        plan.done(0.0)
        return 0.0

    def _stop(self, plan: Plan, epoch: int) -> float:
        self._settle()
        began = time.perf_counter()
        self._end(plan, epoch)
        spent = time.perf_counter() - began
        plan.done(self._start_s + spent)
        return spent

    def _end(self, plan: Plan, epoch: int) -> None:
        self._tracer.stop()
        self._open = None
        reading = threading.Thread(
            target=plan.read,
            args=(self._folder, epoch, self._measured),
            name="nbdist-trace",
            daemon=True,
        )
        reading.start()
        self._reading = [*(one for one in self._reading if one.is_alive()), reading]
