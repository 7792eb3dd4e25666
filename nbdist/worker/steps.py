"""The loop of a step cell on one rank: nothing of a step passes through the notebook."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from nbdist.errors import AnotherRankError, StepError
from nbdist.records import Checked, Note, StepBegun
from nbdist.worker.agreement import check_data
from nbdist.worker.data import Cut, described
from nbdist.worker.prefetch import Feed
from nbdist.worker.profiling import Profile
from nbdist.worker.remarks import remarks
from nbdist.worker.sources import open_source
from nbdist.worker.tracing import Samples, Tracing
from nbdist.worker.warm_up import warm_up_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nbdist.records import NoteTopic, Rate, StepOptions, StepRequest
    from nbdist.worker.check import Findings
    from nbdist.worker.data import Batch
    from nbdist.worker.sources import Source
    from nbdist.worker.state import Worker
    from nbdist.worker.stop import StopPoint
    from nbdist.worker.traces import Tracer
    from nbdist.worker.tracing import Plan

IN_FLIGHT = 2
"""Steps that may be under way before the oldest one's report is read, and so waited for."""

MANY_COMPILATIONS = 4


class Landed(msgspec.Struct, frozen=True):
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


class Stepper(Protocol):
    """One framework's way to make a step.

    Attributes:
        replicas: how many replicas share a global batch.
        reduced: whether reports are the same on all ranks.
        tracer: the framework's profiler.
    """

    replicas: int
    reduced: bool
    tracer: Tracer

    def scale_rates(self, warmup_steps: int) -> tuple[Rate, ...]:
        """Multiply every learning rate by the number of replicas, from `warmup_steps` on.

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

    def step(self, batch: Batch) -> Any:
        """Begin a step; returns its report, which may not be there yet."""
        ...

    def read(self, report: Any) -> Landed:
        """Wait for a report."""
        ...

    def compilations(self) -> int:
        """How often the step has been compiled."""
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


def run(
    worker: Worker,
    request: StepRequest,
    namespace: dict[str, Any],
    stepper: Stepper,
    stop: StopPoint,
) -> None:
    """Go through the data, and report every step and every epoch.

    Raises:
        KeyboardInterrupt: there was an interrupt; all ranks have made the same steps.
        StepError: the data are no data set, or empty; a check failed; a value is not finite.
    """
    options = request.options
    try:
        source = open_source(
            namespace[options.data],
            options,
            rank=worker.rank,
            ranks=worker.world_size,
            gather=stepper.gather,
        )
        with contextlib.closing(_Loop(worker, options, stepper, source, stop)) as loop:
            for number in range(1, options.epochs + 1):
                if not loop.epoch(number):
                    break
    finally:
        stepper.finish()


class _Flying(NamedTuple):
    """A step that is under way."""

    step: int
    rows: int
    input_s: float
    report: Any


class _Loop:
    def __init__(
        self,
        worker: Worker,
        options: StepOptions,
        stepper: Stepper,
        source: Source,
        stop: StopPoint,
    ) -> None:
        self._stop = stop
        self._worker = worker
        self._options = options
        self._stepper = stepper
        self._source = source
        self._cut = Cut(rank=worker.rank, ranks=worker.world_size, replicas=stepper.replicas)
        self._feed = Feed(source, options, self._note)
        self._tracing = Tracing(stepper.tracer, self._plans(), self._land_all)
        self._left = options.steps or -1
        self._step = 0
        self._epoch = 0
        self._sums: dict[str, float] = {}
        self._compiled = 0
        self._not_finite: set[str] = set()
        self._flying: deque[_Flying] = deque()
        self._landed_at = time.perf_counter()

    def _plans(self) -> tuple[Plan, ...]:
        """Steps that are traced."""
        worker, options, tracer = self._worker, self._options, self._stepper.tracer
        plans: list[Plan] = [Profile(worker, options, tracer)] if options.profile else []
        if tracer.must_sample and self._cut.ranks > 1:
            plans.append(Samples(worker, tracer))
        return tuple(plans)

    def close(self) -> None:
        """End what is beside the steps."""
        self._tracing.close(self._epoch)

    def epoch(self, number: int) -> bool:
        """Make an epoch's steps; False once there is no step left to make."""
        self._epoch, self._sums = number, {}
        rows = 0
        with contextlib.closing(self._feed.epoch(number, self._cut, self._left)) as batches:
            for batch, input_s in batches:
                self._make(batch, input_s)
                rows += batch.rows
                if self._left == 0:
                    break
        self._land_all()
        if not rows:
            raise StepError(f"epoch {number} had no batch: the data are empty")
        self._say(number, -1, {name: total / rows for name, total in self._sums.items()}, {})
        return self._left != 0

    def _make(self, batch: Batch, input_s: float) -> None:
        """Begin the next step."""
        if self._stop.is_before(self._step + 1):
            self._land_all()
            raise KeyboardInterrupt
        if self._step == 0:
            self._begin(batch)
            self._landed_at = time.perf_counter()
        self._left -= 1
        self._step += 1
        self._worker.step = self._step
        self._landed_at += self._tracing.before(self._step, self._epoch)
        report = self._stepper.step(batch)
        self._flying.append(_Flying(self._step, batch.rows, input_s, report))
        self._note_compilation(batch)
        if len(self._flying) > IN_FLIGHT:
            self._land()

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _begin(self, batch: Batch) -> None:
        """Say how it is going to be, what could be better, and whether it is right."""
        options, source = self._options, self._source
        if source.common and self._cut.ranks > 1:
            check_data(options.data, batch, source.samples, self._stepper.gather)
        steps = source.steps * options.epochs if source.steps >= 0 else -1
        if options.steps:
            steps = min(steps, options.steps) if steps >= 0 else options.steps
        rates = (
            self._stepper.scale_rates(warm_up_steps(steps, source.steps))
            if options.scale_lr
            else ()
        )
        begun = StepBegun(
            replicas=self._stepper.replicas,
            batch=batch.rows,
            samples=source.samples,
            epochs=options.epochs,
            steps=steps,
            sharding=source.sharding,
            rates=rates,
            **self._worker.said(),
        )
        self._worker.say(begun)
        for text in remarks(begun):
            self._note("batch", text, warning=True)
        if options.check:
            self._check(batch)

    def _check(self, batch: Batch) -> None:
        found = self._stepper.check(batch)
        checked = Checked(
            rows=batch.rows,
            replicas=self._stepper.replicas,
            differences=found.differences,
            causes=found.causes,
            **self._worker.said(),
        )
        self._worker.say(checked)
        failed = [d for d in checked.differences if not d.passes]
        if failed:
            worst = max(failed, key=lambda d: d.largest)
            raise StepError(
                f"--check: {len(failed)} of {len(checked.differences)} values differ between one "
                f"replica and {checked.replicas}, most `{worst.name}` by {worst.largest:.2g} "
                f"(may be {worst.tolerance:.0e}); nothing was trained. " + " ".join(checked.causes)
            )

    def _note_compilation(self, batch: Batch) -> None:
        compiled = self._stepper.compilations()
        if compiled == self._compiled:
            return
        again, self._compiled = self._compiled > 0, compiled
        if again:
            text = f"step {self._step} was compiled anew for a batch of {described(batch.values)}"
            self._note("compiled", text)
        if compiled == MANY_COMPILATIONS + 1:
            text = (
                f"the step has been compiled {compiled} times: sequences of many lengths are "
                "padded to a few with --bucket 32,64,128"
            )
            self._note("compiled", text, warning=True)

    def _land(self) -> None:
        epoch, sums = self._epoch, self._sums
        flying = self._flying.popleft()
        step = flying.step
        landed = self._stepper.read(flying.report)
        before, self._landed_at = self._landed_at, time.perf_counter()
        for name, value in landed.values.items():
            sums[name] = sums.get(name, 0.0) + value * flying.rows
        step_s = self._landed_at - before
        measured = {"step_s": step_s, "input_s": flying.input_s, **landed.measured}
        self._tracing.landed(step, measured)
        self._say(epoch, step, landed.values, measured)
        bad = [name for name, value in landed.values.items() if not math.isfinite(value)]
        fresh = [name for name in bad if name not in self._not_finite]
        for name in fresh:
            self._not_finite.add(name)
            value = landed.values[name]
            self._note("nan", f"`{name}` is {value} at step {step}, epoch {epoch}", warning=True)
        if not landed.finite and self._options.on_nan == "stop":
            self._stop_not_finite(step, bad, landed.reason)

    def _stop_not_finite(self, step: int, bad: list[str], reason: str) -> None:
        if not bad:
            raise AnotherRankError(
                f"stopped at step {step}: {reason}. Look for a square root of zero or a division "
                "by it, or lower the learning rate; --on-nan warn goes on regardless"
            )
        raise StepError(
            f"`{bad[0]}` is not finite at step {step} on rank {self._worker.rank}: look for a log "
            "or a division by zero, or lower the learning rate; --on-nan warn goes on regardless"
        )

    def _note(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        self._worker.say(Note(topic=topic, text=text, warning=warning, **self._worker.said()))

    def _say(
        self, epoch: int, step: int, values: dict[str, float], measured: dict[str, float]
    ) -> None:
        own, shared = ({}, values) if self._stepper.reduced else (values, {})
        self._worker.report_values(epoch, step, own=own, shared=shared, measured=measured)
