"""When a run is traced: some steps now and then, so that the collectives of JAX are timed.

JAX's programs do not time themselves, and its profiler costs little: 3 ms to start and stop, and
0.3 ms for each step that is traced. All ranks trace at the same moments of the run, and so, but for
a step now and then, the same steps; nothing is exchanged for it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nbdist.worker.profiling.trace import collective_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.runtime.context import Worker

SAMPLED_STEPS = 4
SHARE = 0.005
"""Of the time, what samples may cost."""

GAP_S = 4.0
"""Between samples; doubled as long as one costs more than its `SHARE`."""

LONGEST_STRIDE = 128
"""Samples begin at multiples of a number of steps, which grows with the steps up to this.

Ranks look at clocks of their own, some milliseconds apart: so they see the same time at the same
step, most of the time.
"""

_SETTLED_STEP = 4
"""Until then the first step has been waited for, which was compiled, and ends on all at once."""

_READING_S = 60.0
"""How long the end of a run waits for what was traced to be read."""


class Plan(Protocol):
    """Some steps that are to be traced.

    Attributes:
        steps: how many at a time.
    """

    steps: int

    def is_due(self, step: int) -> bool:
        """Whether to begin before `step`; asked before each."""
        ...

    def folder(self) -> Path:
        """Where the next trace goes."""
        ...

    def done(self, cost_s: float) -> None:
        """A trace was taken, which cost so much beside the steps."""
        ...

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        """Report steps, of which the loop has measured that; on a thread of its own."""
        ...

    def close(self) -> None:
        """There are no more steps."""
        ...


class Samples:
    """A few steps now and then, of which the time in collectives is reported.

    Args:
        worker: this rank.
        tracer: the framework's profiler.
        each: where a step that is traced is several of those that are reported, how many.
    """

    steps = SAMPLED_STEPS

    def __init__(self, worker: Worker, tracer: Tracer, each: int = 1) -> None:
        self._worker = worker
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
        """The next one is at a multiple of the gap, where ranks meet whatever theirs is."""
        while cost_s > self._gap_s * SHARE:
            self._gap_s *= 2
        passed = time.perf_counter() - self._began
        self._next_s = (passed // self._gap_s + 1) * self._gap_s

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        """A step's time is told once more, beside the part of it that was in collectives.

        A trace that the end of the run cut short is left out.
        """
        try:
            if len(measured) < self.steps:
                return
            spent = collective_seconds(self._tracer.read(folder), len(measured))
        finally:
            shutil.rmtree(folder)
        for (step, times), collective_s in zip(measured.items(), spent, strict=True):
            more = {"step_s": times["step_s"], "collective_s": collective_s / self._each}
            self._worker.report_values(epoch, step, own={}, shared={}, measured=more)

    def close(self) -> None:
        pass


class Tracing:
    """Starts and stops the profiler between steps.

    Args:
        tracer: the framework's profiler.
        plans: what is to be traced; one at a time, the first that is due.
        land: waits for the steps that are under way.
    """

    def __init__(self, tracer: Tracer, plans: tuple[Plan, ...], land: Callable[[], None]) -> None:
        self._tracer = tracer
        self._plans = plans
        self._land = land
        self._open: Plan | None = None
        self._reading: list[threading.Thread] = []
        self._measured: dict[int, dict[str, float]] = {}

    def step_result(self, step: int, measured: dict[str, float]) -> None:
        """To be told of each step that is done."""
        if self._open is not None:
            self._measured[step] = measured

    def before(self, step: int, epoch: int) -> float:
        """To be called before each step; returns the seconds that the profiler took."""
        if self._open is not None:
            ends = step >= self._first + self._open.steps
            return self._stop(self._open, epoch) if ends else 0.0
        for plan in self._plans:
            if plan.is_due(step):
                return self._start(plan, step)
        return 0.0

    def cut(self, epoch: int) -> None:
        """To be called where what follows is no step: what is under way ends before it."""
        if self._open is not None:
            self._stop(self._open, epoch)

    def close(self, epoch: int) -> None:
        """End what is under way, and wait until what was traced has been reported."""
        if self._open is not None:
            self._end(self._open, epoch)
        for reading in self._reading:
            reading.join(_READING_S)
        for plan in self._plans:
            plan.close()

    def _start(self, plan: Plan, step: int) -> float:
        self._land()
        began = time.perf_counter()
        folder = plan.folder()
        if self._tracer.start(folder):
            self._open, self._first, self._folder, self._measured = plan, step, folder, {}
            self._start_s = time.perf_counter() - began
            return self._start_s
        with contextlib.suppress(OSError):  # earlier traces may be there
            folder.rmdir()
        plan.done(0.0)
        return 0.0

    def _stop(self, plan: Plan, epoch: int) -> float:
        self._land()
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
