"""`--profile`: a trace of some steps, and the time of their operations."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.records import Operation, Profiled
from nbdist.worker.profiling.trace import KINDS, attributed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.records import StepOptions
    from nbdist.worker.profiling.trace import Kind, Span, Tracer
    from nbdist.worker.runtime.rank_reporter import RankReporter

FIRST_STEP = 6
"""First step to trace; the steps before it compile and warm up."""

TOP_OPERATIONS = 8


class Profile:
    """A plan to trace a run once and report the result.

    Args:
        reporter: reporter of this rank.
        options: options of the step.
        tracer: profiler of the framework.
    """

    def __init__(self, reporter: RankReporter, options: StepOptions, tracer: Tracer) -> None:
        self.steps = options.profile
        self._reporter = reporter
        self._kept = options.profile_folder
        self._tracer = tracer
        self._taken = False
        self._is_reported = False

    def is_due(self, step: int) -> bool:
        """Return True if to begin; later than `FIRST_STEP` if a sample is under way there."""
        return step >= FIRST_STEP and not self._taken

    def folder(self) -> Path:
        if not self._kept:
            return Path(tempfile.mkdtemp(prefix="nbdist-trace-"))
        folder = Path(self._kept) / f"rank-{self._reporter.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def done(self, cost_s: float) -> None:
        """Note the trace. It is not repeated, whatever it cost."""
        self._taken = True

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        del epoch
        try:
            spans = self._tracer.read(folder)
        finally:
            if not self._kept:
                shutil.rmtree(folder)
        self._is_reported = bool(measured)
        if measured:
            self._report(
                spans, list(measured.values()), str(folder) if self._kept and spans else ""
            )

    def close(self) -> None:
        """Report an empty profile if the run ended before a trace."""
        if not self._is_reported:
            self._reporter.send(Profiled(steps=0, **self._reporter.record_fields()))

    def _report(self, spans: Sequence[Span], times: list[dict[str, float]], folder: str) -> None:
        steps, seconds = len(times), sum(t["step_s"] for t in times)
        spent = attributed(spans) if spans else by_the_loop(times)
        profiled = Profiled(
            steps=steps,
            step_s=seconds / steps,
            compute_s=spent["compute"] / steps,
            collective_s=spent["collective"] / steps,
            to_device_s=spent["to_device"] / steps,
            to_host_s=spent["to_host"] / steps,
            top=tuple(top_operations(spans, steps)),
            folder=folder,
            **self._reporter.record_fields(),
        )
        self._reporter.send(profiled)


def by_the_loop(times: Sequence[dict[str, float]]) -> dict[Kind, float]:
    """Return seconds of each kind from the loop's own measurements, if a trace has no operations.

    Computing time is then the time spent neither in collectives nor waiting for data. Only the
    sums are meaningful: TensorFlow runs a step when it begins, but the loop reads its report two
    steps later.
    """
    step_s, input_s, collective_s = (
        sum(step.get(name, 0.0) for step in times) for name in ("step_s", "input_s", "collective_s")
    )
    spent = dict.fromkeys(KINDS, 0.0)
    spent["collective"] = min(collective_s, step_s)
    spent["compute"] = max(0.0, step_s - input_s - collective_s)
    return spent


def top_operations(spans: Sequence[Span], steps: int) -> list[Operation]:
    """Return the operations with the most time, summed over devices and threads."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for span in spans:
        seconds[span.name] += span.end_s - span.begin_s
        counts[span.name] += 1
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:TOP_OPERATIONS]
    return [
        Operation(name=name, seconds=seconds[name] / steps, count=counts[name] / steps)
        for name in longest
    ]
