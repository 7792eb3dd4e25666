"""The loop of a step cell on one rank: nothing of a step passes through the notebook."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from nbdist.errors import AnotherRankError, StepError
from nbdist.records import Checked, Compiled, Planned, StepBegun
from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.checkpoint.saver import checkpoints
from nbdist.worker.data.batches import Cut, described
from nbdist.worker.data.prefetch import Feed
from nbdist.worker.data.sources import open_source
from nbdist.worker.training.advice import remarks
from nbdist.worker.training.prechecks import check_data
from nbdist.worker.training.profile import Profile
from nbdist.worker.training.replica_guard import guard_of
from nbdist.worker.training.trace_schedule import Samples, Tracing
from nbdist.worker.training.warmup import warm_up_steps

if TYPE_CHECKING:
    from nbdist.records import Saving, StepOptions, StepRequest
    from nbdist.worker.checkpoint.saver import State
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.data.sources import Source
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.runtime.stop_point import StopPoint
    from nbdist.worker.training.step_contract import StepStrategy
    from nbdist.worker.training.trace_schedule import Plan

IN_FLIGHT = 2
"""Steps that may be under way before the oldest one's report is read, and so waited for."""

MANY_COMPILATIONS = 4


def check_names(request: StepRequest, namespace: dict[str, Any]) -> None:
    """Raises StepError, with the line, for names that the step needs and the rank lacks."""
    needed = {**request.program.reads, **request.program.carried_lines}
    missing = [f"`{n}` (line {line})" for n, line in needed.items() if n not in namespace]
    if request.options.data not in namespace:
        missing.append(f"`{request.options.data}` (--data)")
    if missing:
        raise StepError(f"not defined on the workers: {', '.join(missing)}")


def run(
    worker: Worker,
    request: StepRequest,
    namespace: dict[str, Any],
    step_strategy: StepStrategy,
    stop: StopPoint,
    saving: Saving | None,
) -> None:
    """Go through the data, and report every step and every epoch.

    Raises:
        KeyboardInterrupt: there was an interrupt; all ranks have made the same steps.
        StepError: the data are no data set, or empty; a check failed; a value is not finite; a
            checkpoint cannot be written, or does not fit.
    """
    options = request.options
    try:
        source = open_source(
            namespace[options.data],
            options,
            rank=worker.rank,
            ranks=worker.world_size,
            gather=step_strategy.gather,
        )
        if options.planning.only:
            _plan(worker, source, step_strategy)
            return
        with contextlib.ExitStack() as ending:
            loop = _Loop(worker, options, step_strategy, source, stop, saving)
            ending.push(loop.end)
            loop.run()
    finally:
        step_strategy.finish()


def _plan(worker: Worker, source: Source, step_strategy: StepStrategy) -> None:
    """Say how steps would be laid out; none is made."""
    cut = Cut(rank=worker.rank, ranks=worker.world_size, replicas=step_strategy.shards)
    plan = step_strategy.layout(next(source.epoch(1, cut)))
    if worker.rank == 0:
        worker.say(Planned(plan=plan, only=True, **worker.said()))


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
        step_strategy: StepStrategy,
        source: Source,
        stop: StopPoint,
        saving: Saving | None,
    ) -> None:
        self._stop = stop
        self._worker = worker
        self._options = options
        self._step_strategy = step_strategy
        self._source = source
        self._cut = Cut(rank=worker.rank, ranks=worker.world_size, replicas=step_strategy.shards)
        self._feed = Feed(source, options, worker.note, self._pass_over)
        self._tracing = Tracing(step_strategy.tracer, self._plans(), self._land_all)
        self._checkpoints = checkpoints(
            saving, worker, batch=options.batch, common=source.common, gather=step_strategy.gather
        )
        self._guard = guard_of(worker, lambda: step_strategy.gather)
        self._state: State
        self._begun = self._stops = False
        self._left = options.steps or -1
        self._at = Position(step=0, epoch=1, batches=0)
        self._compiled = 0
        self._not_finite: set[str] = set()
        self._flying: deque[_Flying] = deque()
        self._step_ended_at = time.perf_counter()

    def _plans(self) -> tuple[Plan, ...]:
        """Steps that are traced."""
        worker, options, tracer = self._worker, self._options, self._step_strategy.tracer
        plans: list[Plan] = [Profile(worker, options, tracer)] if options.profile else []
        if tracer.must_sample and self._cut.ranks > 1:
            plans.append(Samples(worker, tracer))
        return tuple(plans)

    def end(self, *raised: object) -> None:
        """End what is beside the steps."""
        agreed = self._stops or isinstance(raised[1], StepError)  # all have made the same steps
        cut = isinstance(raised[1], KeyboardInterrupt)  # what it has just begun is nowhere noted
        self._worker.unfinished = (cut or bool(self._flying)) and not agreed
        try:
            self._tracing.close(min(self._at.epoch, self._options.epochs))
        finally:
            self._checkpoints.close(failed=raised[0] is not None and not self._stops)

    def run(self) -> None:
        """From the newest checkpoint on, if that was asked for, to the end."""
        options = self._options
        self._at = self._checkpoints.begin() or self._at
        self._worker.step = self._at.step
        if options.steps:
            self._left = max(0, options.steps - self._at.step)
        for number in range(1, self._at.epoch) if not self._source.by_number else ():
            for _ in self._source.epoch(number, self._cut):  # an epoch's order depends on these
                self._pass_over()
        for number in range(self._at.epoch, options.epochs + 1):
            if not self._left or not self._epoch(number):
                break
        if not self._begun:  # all had been done before
            self._begin(next(iter(self._source.epoch(1, self._cut))))
        self._save()

    def _pass_over(self) -> None:
        """A batch that was trained on before: the rank makes no step, and stands not still."""
        self._worker.tested += 1

    def _epoch(self, number: int) -> bool:
        """Make an epoch's steps; False once there is no step left to make."""
        first = self._at.batches
        feed = self._feed.epoch(number, self._cut, self._left, first)
        with contextlib.closing(feed) as batches:
            for batch, input_s in batches:
                self._make(batch, input_s)
                if self._left == 0:
                    break
        self._land_all()
        self._step_strategy.write_back()
        at = self._at
        if not at.rows:
            raise StepError(f"epoch {number} had no batch: the data are empty")
        means = {name: total / at.rows for name, total in at.sums.items()}
        self._say(number, -1, means, {})
        if self._left:
            self._at = Position(step=at.step, epoch=number + 1, batches=0)
        return self._left != 0

    def _make(self, batch: Batch, input_s: float) -> None:
        """Begin the next step."""
        if self._stop.is_before(self._at.step + 1):
            if self._begun:
                self._save()
            self._stops = True
            raise KeyboardInterrupt
        if not self._begun:
            self._begin(batch)
            self._step_ended_at = time.perf_counter()
        if self._checkpoints.due(self._at.step):
            self._save()
        self._left -= 1
        at = self._at
        step = at.step + 1
        self._at = structs.replace(at, step=step, batches=at.batches + 1, rows=at.rows + batch.rows)
        self._worker.step = step
        self._step_ended_at += self._tracing.before(step, at.epoch)
        report = self._step_strategy.step(batch)
        self._flying.append(_Flying(step, batch.rows, input_s, report))
        self._note_compilation(batch)
        if len(self._flying) > IN_FLIGHT:
            self._land()
        if self._guard.due(step):
            self._land_all()  # all ranks come here: none that differs leaves a step under way
            self._guard.compare(step, lambda: self._state)
            self._step_ended_at = time.perf_counter()

    def _save(self) -> None:
        """Save the state after the last step, unless that has been done."""
        self._land_all()
        self._checkpoints.save(self._at)
        self._step_ended_at = time.perf_counter()

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _begin(self, batch: Batch) -> None:
        """Say how it is going to be, what could be better, and whether it is right."""
        self._begun = True
        options, source = self._options, self._source
        if source.common and self._cut.ranks > 1:
            check_data(options.data, batch, source.samples, self._step_strategy.gather)
        self._step_strategy.prepare(batch)
        if self._step_strategy.plan is not None and self._worker.rank == 0:
            self._worker.say(Planned(plan=self._step_strategy.plan, **self._worker.said()))
        steps = source.steps * options.epochs if source.steps >= 0 else -1
        if options.steps:
            steps = min(steps, options.steps) if steps >= 0 else options.steps
        rates = (
            self._step_strategy.scale_rates(warm_up_steps(steps, source.steps), self._at.step)
            if options.scale_lr
            else ()
        )
        begun = StepBegun(
            replicas=self._step_strategy.replicas,
            batch=options.batch or batch.rows,
            samples=source.samples,
            epochs=options.epochs,
            steps=steps,
            sharding=source.sharding,
            rates=rates,
            changes=self._step_strategy.changes,
            **self._worker.said(),
        )
        self._worker.say(begun)
        for text in remarks(begun):
            self._worker.note("batch", text, warning=True)
        self._state = self._step_strategy.state()
        self._checkpoints.open(self._state)
        if options.check:
            self._check(batch)

    def _check(self, batch: Batch) -> None:
        found = self._step_strategy.check(batch)
        checked = Checked(
            rows=batch.rows,
            replicas=self._step_strategy.replicas,
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
        compiled = self._step_strategy.compilations()
        if compiled == self._compiled:
            return
        again, self._compiled = self._compiled > 0, compiled
        self._say_footprint()
        if again:
            kind = described(batch.values)
            text = f"step {self._at.step} was compiled anew for a batch of {kind}"
            self._worker.note("compiled", text)
        if compiled == MANY_COMPILATIONS + 1:
            text = (
                f"the step has been compiled {compiled} times: sequences of many lengths are "
                "padded to a few with --bucket 32,64,128"
            )
            self._worker.note("compiled", text, warning=True)

    def _say_footprint(self) -> None:
        found = self._step_strategy.footprint
        if found is not None and self._worker.rank == 0:
            self._worker.say(
                Compiled(
                    arguments=found.arguments,
                    temporaries=found.temporaries,
                    seconds=found.seconds,
                    **self._worker.said(),
                )
            )

    def _land(self) -> None:
        epoch, sums = self._at.epoch, self._at.sums
        flying = self._flying.popleft()
        step = flying.step
        step_result = self._step_strategy.read(flying.report)
        before, self._step_ended_at = self._step_ended_at, time.perf_counter()
        for name, value in step_result.values.items():
            sums[name] = sums.get(name, 0.0) + value * flying.rows
        step_s = self._step_ended_at - before
        measured = {"step_s": step_s, "input_s": flying.input_s, **step_result.measured}
        self._tracing.step_result(step, measured)
        self._say(epoch, step, step_result.values, measured)
        bad = [name for name, value in step_result.values.items() if not math.isfinite(value)]
        fresh = [name for name in bad if name not in self._not_finite]
        for name in fresh:
            self._not_finite.add(name)
            value = step_result.values[name]
            self._worker.note(
                "nan", f"`{name}` is {value} at step {step}, epoch {epoch}", warning=True
            )
        if not step_result.finite and self._options.on_nan == "stop":
            self._stop_not_finite(step, bad, step_result.reason)

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

    def _say(
        self, epoch: int, step: int, values: dict[str, float], measured: dict[str, float]
    ) -> None:
        own, shared = ({}, values) if self._step_strategy.reduced else (values, {})
        self._worker.report_values(epoch, step, own=own, shared=shared, measured=measured)
