"""Schedule of traces: times of samples, their cost, and the reports of the traced steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.worker.profiling.trace import Span
from nbdist.worker.training import trace_schedule
from nbdist.worker.training.trace_schedule import (
    GAP_S,
    LONGEST_STRIDE,
    SAMPLED_STEPS,
    SHARE,
    Samples,
    Tracing,
)
from tests.clock import replace_time
from tests.worker.doubles import RecordedTracer, Recorder

if TYPE_CHECKING:
    from pathlib import Path


def samples(tracer: RecordedTracer | None = None, each: int = 1) -> tuple[Samples, Recorder]:
    reporter: Any = Recorder()
    return Samples(reporter, tracer or RecordedTracer(), each), reporter


class TestSamples:
    def test_first_steps_restart_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = replace_time(monkeypatch, trace_schedule)
        plan, _ = samples()
        for step in range(1, 5):
            assert not plan.is_due(step)
            clock.now += 100
        clock.now += GAP_S - 100.5
        assert not plan.is_due(5)
        clock.now += 0.5
        assert plan.is_due(5)

    @pytest.mark.parametrize(
        ("step", "stride"),
        [(5, 1), (31, 1), (32, 2), (64, 4), (600, 32), (2048, 128), (10**6, LONGEST_STRIDE)],
    )
    def test_stride_grows_with_the_step(
        self, monkeypatch: pytest.MonkeyPatch, step: int, stride: int
    ) -> None:
        clock = replace_time(monkeypatch, trace_schedule)
        plan, _ = samples()
        plan.is_due(1)
        clock.now += 2 * GAP_S
        start = -(-step // stride) * stride
        due = [number for number in range(start, start + 2 * stride) if plan.is_due(number)]
        assert due == [start, start + stride]

    def test_cheap_sample_keeps_the_gap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = replace_time(monkeypatch, trace_schedule)
        plan, _ = samples()
        plan.is_due(1)
        clock.now += 2 * GAP_S + 1
        plan.done(GAP_S * SHARE)
        clock.now += GAP_S - 1.5
        assert not plan.is_due(6)
        clock.now += 0.5
        assert plan.is_due(6)

    def test_expensive_sample_doubles_the_gap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = replace_time(monkeypatch, trace_schedule)
        plan, _ = samples()
        plan.is_due(1)
        clock.now += 5 * GAP_S
        plan.done(3 * GAP_S * SHARE)
        clock.now += 3 * GAP_S - 0.5
        assert not plan.is_due(6)
        clock.now += 0.5
        assert plan.is_due(6)

    def test_collectives_of_the_steps_are_reported(self) -> None:
        tracer = RecordedTracer()
        tracer.spans = [
            Span("collective", "all-reduce", 0, run, 10 * run, 10 * run + 2 * run)
            for run in range(1, SAMPLED_STEPS + 1)
        ]
        plan, reporter = samples(tracer, each=2)
        folder = plan.folder()
        (folder / "trace").touch()
        measured = {7 + run: {"step_s": 6.0 * run, "input_s": 1.0} for run in range(SAMPLED_STEPS)}
        plan.read(folder, 2, measured)
        assert [(one.epoch, one.step) for one in reporter.values] == [
            (2, 7 + run) for run in range(SAMPLED_STEPS)
        ]
        assert [one.measured for one in reporter.values] == [
            {"step_s": 9.0, "collective_s": float(run + 1)} for run in range(SAMPLED_STEPS)
        ]
        assert not folder.exists()

    def test_incomplete_sample_is_skipped(self) -> None:
        plan, reporter = samples()
        folder = plan.folder()
        plan.read(folder, 1, {step: {"step_s": 1.0} for step in range(SAMPLED_STEPS - 1)})
        assert not reporter.values
        assert not folder.exists()


class Recorded:
    """A plan that is due at some steps and records its calls."""

    def __init__(self, folder: Path, *due: int, steps: int = 2) -> None:
        self.steps = steps
        self.calls: list[Any] = []
        self._folder = folder
        self._due = due

    def is_due(self, step: int) -> bool:
        return step in self._due

    def folder(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        return self._folder

    def done(self, cost_s: float) -> None:
        self.calls.append(("done", cost_s))

    def read(self, folder: Path, epoch: int, measured: dict[int, dict[str, float]]) -> None:
        assert folder == self._folder
        self.calls.append(("read", epoch, [*measured]))

    def close(self) -> None:
        self.calls.append("close")


class Steps:
    """Steps under way of a run, each with two calls of a `Tracing`."""

    def __init__(self, tracer: RecordedTracer, *plans: Recorded) -> None:
        self.settled: list[int] = []
        self.tracing = Tracing(tracer, plans, lambda: self.settled.append(self._step))
        self._step = 0

    def make(self, first: int, last: int, epoch: int = 1) -> list[float]:
        """Make steps; return the seconds that their traces took."""
        seconds = []
        for self._step in range(first, last + 1):
            seconds.append(self.tracing.before(self._step, epoch))
            self.tracing.step_result(self._step, {"step_s": 1.0})
        return seconds


class TestTracing:
    def test_trace_contains_as_many_steps_as_planned(self, tmp_path: Path) -> None:
        tracer, plan = RecordedTracer(), Recorded(tmp_path / "a", 3, 4)
        steps = Steps(tracer, plan)
        seconds = steps.make(1, 7)
        steps.tracing.close(1)
        assert tracer.calls == ["start", "stop"]
        assert steps.settled == [3, 5]
        assert [second > 0 for second in seconds] == [step in (3, 5) for step in range(1, 8)]
        assert ("read", 1, [3, 4]) in plan.calls
        (cost_s,) = [call[1] for call in plan.calls if call[0] == "done"]
        assert cost_s == pytest.approx(sum(seconds))
        assert plan.calls[-1] == "close"

    def test_first_plan_that_is_due_is_traced(self, tmp_path: Path) -> None:
        tracer = RecordedTracer()
        plans = [Recorded(tmp_path / name, *due) for name, due in (("a", (3,)), ("b", (2, 3)))]
        steps = Steps(tracer, *plans)
        steps.make(1, 6)
        steps.tracing.close(1)
        assert ("read", 1, [2, 3]) in plans[1].calls
        assert plans[0].calls == ["close"]

    def test_busy_profiler_is_no_trace(self, tmp_path: Path) -> None:
        tracer, plan = RecordedTracer(is_free=False), Recorded(tmp_path / "a", 2)
        steps = Steps(tracer, plan)
        assert steps.make(1, 3) == [0.0] * 3
        steps.tracing.close(1)
        assert tracer.calls == ["start"]
        assert plan.calls == [("done", 0.0), "close"]
        assert not (tmp_path / "a").exists()

    def test_busy_profiler_keeps_a_folder_with_earlier_traces(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "trace").touch()
        steps = Steps(RecordedTracer(is_free=False), Recorded(tmp_path / "a", 2))
        steps.make(1, 3)
        assert (tmp_path / "a" / "trace").exists()

    def test_end_of_the_run_stops_the_trace(self, tmp_path: Path) -> None:
        tracer, plan = RecordedTracer(), Recorded(tmp_path / "a", 2, steps=9)
        steps = Steps(tracer, plan)
        steps.make(1, 3)
        steps.tracing.close(4)
        assert tracer.calls == ["start", "stop"]
        assert plan.calls == [("read", 4, [2, 3]), "close"]

    def test_work_outside_of_steps_stops_the_trace(self, tmp_path: Path) -> None:
        tracer, plan = RecordedTracer(), Recorded(tmp_path / "a", 2, 5, steps=9)
        steps = Steps(tracer, plan)
        steps.tracing.stop(1)
        steps.make(1, 3)
        steps.tracing.stop(1)
        assert tracer.calls == ["start", "stop"]
        steps.make(4, 5, epoch=2)
        steps.tracing.close(2)
        reads = [call for call in plan.calls if call[0] == "read"]
        assert reads == [("read", 1, [2, 3]), ("read", 2, [5])]
