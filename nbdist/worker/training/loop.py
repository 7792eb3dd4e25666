"""Loop of a step cell on one rank, and its steps. The notebook takes no part in a step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from msgspec import structs

from nbdist.errors import StepError
from nbdist.records import Checked, Planned, StepBegun
from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.checkpoint.saver import checkpoints
from nbdist.worker.data.batches import RankRows, described
from nbdist.worker.data.prefetch import Feed
from nbdist.worker.data.sources import open_source
from nbdist.worker.training.prechecks import check_data, remarks
from nbdist.worker.training.profile import Profile
from nbdist.worker.training.replica_guard import guard_of
from nbdist.worker.training.steps_in_flight import StepsInFlight
from nbdist.worker.training.trace_schedule import Samples
from nbdist.worker.training.warmup import warm_up_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Saving, StepOptions, StepRequest
    from nbdist.worker.checkpoint.saver import State
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.data.sources import Extent, Source
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.runtime.rank_reporter import RankReporter
    from nbdist.worker.runtime.stop_point import StopPoint
    from nbdist.worker.training.step_contract import StepStrategy
    from nbdist.worker.training.trace_schedule import Plan

MANY_COMPILATIONS = 4


def check_names(request: StepRequest, namespace: dict[str, Any]) -> None:
    """Raise StepError, with the line, for names that the step needs and this rank lacks."""
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
    """Train on the data, and report every step and every epoch.

    Raises:
        KeyboardInterrupt: the run was interrupted; all ranks have completed the same steps.
        StepError: the data are no data set, or empty; a check failed; a value is not finite; a
            checkpoint cannot be written, or does not match the run.
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
            runner = StepRunner(worker, options, step_strategy, source, stop, saving)
            ending.push(runner.end)
            _Loop(worker, options, step_strategy, source, runner).run()
    finally:
        step_strategy.finish()


def _plan(worker: Worker, source: Source, step_strategy: StepStrategy) -> None:
    """Report the layout of the steps without running any."""
    rank_rows = RankRows(rank=worker.rank, ranks=worker.world_size, replicas=step_strategy.shards)
    plan = step_strategy.layout(next(source.epoch(1, rank_rows)))
    if worker.rank == 0:
        worker.reporter.send(Planned(plan=plan, only=True, **worker.reporter.record_fields()))


def _plans(worker: Worker, options: StepOptions, tracer: Tracer) -> tuple[Plan, ...]:
    """Return the steps to trace."""
    plans: list[Plan] = [Profile(worker.reporter, options, tracer)] if options.profile else []
    if tracer.must_sample and worker.world_size > 1 and worker.identity.telemetry:
        plans.append(Samples(worker.reporter, tracer))
    return tuple(plans)


def _sharding(extent: Extent, rows: int, replicas: int) -> str:
    """Return the distribution of samples to ranks for batches of `rows` rows."""
    if extent.sharding.startswith("by row") and rows % replicas:
        reason = f"a batch of {rows} does not divide over {replicas} replicas"
        return f"by element: each worker reads all samples, because {reason}"
    return extent.sharding


class _Loop:
    """Steps of a run, for all batches of a source."""

    def __init__(
        self,
        worker: Worker,
        options: StepOptions,
        step_strategy: StepStrategy,
        source: Source,
        runner: StepRunner,
    ) -> None:
        self._worker = worker
        self._options = options
        self._step_strategy = step_strategy
        self._source = source
        self._runner = runner
        self._feed = Feed(source, options, worker.reporter.note, self._pass_over)

    @property
    def _left(self) -> int:
        """Number of steps left to run; negative without a limit."""
        steps = self._options.steps
        return max(0, steps - self._runner.at.step) if steps else -1

    def run(self) -> None:
        """Run all steps, from the newest checkpoint if the run resumes."""
        options, runner, rank_rows = self._options, self._runner, self._runner.rank_rows
        begin = runner.resume()
        for number in range(1, begin.epoch) if not self._source.by_number else ():
            # The order of the next epoch depends on these batches.
            for _ in self._source.epoch(number, rank_rows):
                self._pass_over()
        for number in range(begin.epoch, options.epochs + 1):
            if not self._left or not self._epoch(number):
                break
        if not runner.has_begun:  # the checkpoint was at the end of the run
            runner.begin(next(iter(self._source.epoch(1, rank_rows))))
        runner.save()

    def _pass_over(self) -> None:
        """Count a batch that the rank skips without a step, so that the rank does not seem hung."""
        self._worker.progress.tested += 1

    def _epoch(self, number: int) -> bool:
        """Run the steps of an epoch; return False if no step is left to run."""
        runner = self._runner
        feed = self._feed.epoch(number, runner.rank_rows, self._left, runner.at.batches)
        with contextlib.closing(feed) as batches:
            for batch, input_s in batches:
                runner.run(batch, input_s)
                if self._left == 0:
                    break
        if not runner.at.rows:
            raise StepError(f"epoch {number} had no batch: the data are empty")
        runner.end_epoch(number)
        if self._left:
            runner.at = Position(step=runner.at.step, epoch=number + 1, batches=0)
        return self._left != 0


class StepRunner:
    """Runs the steps of a run, one for each batch that it receives.

    Args:
        worker: this rank.
        options: options of the step.
        step_strategy: runs the steps.
        extent: size of the data, and their distribution to ranks.
        stop: agrees with the other ranks on the last step.
        saving: options of checkpoints; None for none.
        loop_position: returns the position in the user's loops for a checkpoint.

    Attributes:
        at: position after the last step that began.
        has_begun: True after the preparation of the first step.
    """

    def __init__(
        self,
        worker: Worker,
        options: StepOptions,
        step_strategy: StepStrategy,
        extent: Extent,
        stop: StopPoint,
        saving: Saving | None,
        loop_position: Callable[[], bytes] = bytes,
    ) -> None:
        self.at = Position(step=0, epoch=1, batches=0)
        self.has_begun = False
        self._stop = stop
        self._loop_position = loop_position
        self._worker = worker
        self._options = options
        self._step_strategy = step_strategy
        self._extent = extent
        reporter = worker.reporter
        self._flight = StepsInFlight(
            reporter, step_strategy, _plans(worker, options, step_strategy.tracer), options.on_nan
        )
        self._compilations = _Compilations(reporter, step_strategy)
        self._checkpoints = checkpoints(
            saving,
            reporter,
            ranks=worker.world_size,
            batch=options.batch,
            common=extent.common,
            gather=step_strategy.gather,
        )
        self._guard = guard_of(worker, lambda: step_strategy.gather)
        self._state: State
        self._stops = False

    @property
    def rank_rows(self) -> RankRows:
        """Rows of this rank in a batch."""
        worker = self._worker
        shards = self._step_strategy.shards
        return RankRows(rank=worker.rank, ranks=worker.world_size, replicas=shards)

    def resume(self) -> Position:
        """Prepare the checkpoints; return the position from which the run continues."""
        self.at = self._checkpoints.begin() or self.at
        progress = self._worker.progress
        progress.step = max(progress.step, self.at.step)
        return self.at

    def settle(self) -> None:
        """Wait for all steps under way, before their program ends."""
        self._flight.read_all()

    def continue_from(self, other: StepRunner) -> None:
        """Continue the steps and checkpoints of a runner whose step had other values."""
        self.at = other.at
        self._checkpoints = other._checkpoints

    def end(self, *raised: object) -> None:
        """End the tracing and the checkpoints of the run; note whether it left steps under way."""
        agreed = self._stops or isinstance(raised[1], StepError)  # all ranks ended at this step
        # A step that an interrupt ended as it began is in no list yet.
        interrupted = isinstance(raised[1], KeyboardInterrupt)
        self._worker.cell_state.unfinished = (interrupted or len(self._flight) > 0) and not agreed
        try:
            self._flight.tracing.close(min(self.at.epoch, self._options.epochs or self.at.epoch))
        finally:
            self._checkpoints.close(failed=raised[0] is not None and not self._stops)

    def must_stop(self) -> bool:
        """Return True if the run stops before its next step."""
        return self._stop.is_before(self.at.step + 1)

    def is_due(self) -> bool:
        """Return True if the state is saved before the next step; the same on all ranks."""
        return self._checkpoints.due(self.at.step)

    def run(self, batch: Batch, input_s: float, *, stops: bool | None = None) -> None:
        """Begin the next step.

        Args:
            batch: batch of the step.
            input_s: seconds that the step waited for the batch.
            stops: result of `must_stop` if it has been called for this step.

        Raises:
            KeyboardInterrupt: the run stops before this step.
            StepError: see the function `run`.
        """
        if self.must_stop() if stops is None else stops:
            if self.has_begun:
                self.save()
            self._stops = True
            raise KeyboardInterrupt
        if not self.has_begun:
            self.begin(batch)
            self._flight.restart_clock()
        if self.is_due():
            self.save()
        at = self.at
        step = at.step + 1
        at = structs.replace(at, step=step, batches=at.batches + 1, rows=at.rows + batch.rows)
        self.at = at
        self._worker.progress.step = step
        self._flight.begin(at, batch, input_s)
        self._compilations.note(step, batch)
        self._flight.read_oldest()
        if self._guard.due(step):
            self._flight.read_all()  # on all ranks: a rank that differs then has no step under way
            self._guard.compare(step, lambda: self._state)
            self._flight.restart_clock()

    def end_epoch(self, number: int) -> None:
        """Wait for the steps of an epoch, write the carried values, and report the means."""
        self._flight.read_all()
        self._step_strategy.write_back()
        at = self.at
        means = {name: total / at.rows for name, total in at.sums.items()}
        if means:
            self._flight.report(number, -1, means, {})

    def save(self) -> None:
        """Save the state after the last step, unless it is saved already."""
        self._flight.read_all()
        self._checkpoints.save(self.at, self._loop_position())
        self._flight.restart_clock()

    def begin(self, batch: Batch, *, saves_variables: bool = False) -> None:
        """Prepare the first step: report settings and remarks, open the checkpoints, run checks.

        Args:
            batch: batch of the first step.
            saves_variables: True if the position in the user's loops contains what they change.
        """
        self.has_begun = True
        options, extent = self._options, self._extent
        if extent.common and self._worker.world_size > 1:
            check_data(options.data, batch, extent.samples, self._step_strategy.gather)
        self._step_strategy.prepare(batch)
        reporter = self._worker.reporter
        if self._step_strategy.plan is not None and reporter.rank == 0:
            reporter.send(Planned(plan=self._step_strategy.plan, **reporter.record_fields()))
        steps = extent.steps * options.epochs if extent.steps >= 0 else -1
        if options.steps:
            steps = min(steps, options.steps) if steps >= 0 else options.steps
        hyperparameters = self._step_strategy.hyperparameters  # with the rates before scaling
        rates = (
            self._step_strategy.scale_rates(warm_up_steps(steps, extent.steps), self.at.step)
            if options.scale_lr
            else ()
        )
        begun = StepBegun(
            replicas=self._step_strategy.replicas,
            batch=0 if batch.divided == 0 else options.batch or batch.rows,
            samples=extent.samples,
            epochs=options.epochs,
            steps=steps,
            sharding=_sharding(extent, options.batch or batch.rows, self.rank_rows.replicas),
            rates=rates,
            changes=self._step_strategy.changes,
            hyperparameters=hyperparameters,
            **reporter.record_fields(),
        )
        reporter.send(begun)
        for text in remarks(begun, is_split=begun.batch > 0 and not batch.whole):
            reporter.note_once("batch", text, warning=True)
        self._state = self._step_strategy.state()
        self._checkpoints.open(self._state, has_more=saves_variables)
        if options.check:
            self._check(batch)

    def _check(self, batch: Batch) -> None:
        found = self._step_strategy.check(batch)
        checked = Checked(
            rows=batch.rows,
            replicas=self._step_strategy.replicas,
            differences=found.differences,
            causes=found.causes,
            **self._worker.reporter.record_fields(),
        )
        self._worker.reporter.send(checked)
        failed = [d for d in checked.differences if not d.passes]
        if failed:
            worst = max(failed, key=lambda d: d.largest)
            raise StepError(
                f"--check: {len(failed)} of {len(checked.differences)} values differ between "
                f"one replica and {checked.replicas}, most of all `{worst.name}` by "
                f"{worst.largest:.2g} "
                f"(tolerance {worst.tolerance:.0e}); nothing was trained. "
                + " ".join(checked.causes)
            )


class _Compilations:
    """Reports each compilation of the step, and its cause.

    Args:
        reporter: reporter of this rank.
        step_strategy: runs the steps.
    """

    def __init__(self, reporter: RankReporter, step_strategy: StepStrategy) -> None:
        self._reporter = reporter
        self._step_strategy = step_strategy
        self._compiled = 0

    def note(self, step: int, batch: Batch) -> None:
        """Report a compilation since the last call; its cause is the batch of that step."""
        compiled = self._step_strategy.compilations()
        if compiled == self._compiled:
            return
        again, self._compiled = self._compiled > 0, compiled
        if self._step_strategy.footprint is not None:
            self._reporter.compiled(*structs.astuple(self._step_strategy.footprint))
        if again:
            text = f"step {step} was recompiled for a batch of {described(batch.values)}"
            self._reporter.note("compiled", text)
        if compiled == MANY_COMPILATIONS + 1:
            text = (
                f"the step has been compiled {compiled} times: if the lengths of sequences vary, "
                "pad them to a few lengths with --bucket 32,64,128"
            )
            self._reporter.note("compiled", text, warning=True)
