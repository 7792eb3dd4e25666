"""A training loop of a plain cell, whose steps run on all replicas."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from nbdist.records import StepOptions, StepProgram, StepRequest
from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.data.batch_array import whole
from nbdist.worker.data.dataset_batches import numpy_batches
from nbdist.worker.data.loop_batches import LoopBatches
from nbdist.worker.data.map_pushdown import BY_ELEMENT
from nbdist.worker.data.row_functions import RowFunction
from nbdist.worker.lifting.constants import CONTENTS, MOST_ITEMS, PLAIN, is_same
from nbdist.worker.lifting.passes import LoopPasses, of_cell
from nbdist.worker.lifting.rewrite import LoopProgram
from nbdist.worker.lifting.row_callees import call
from nbdist.worker.runtime import context
from nbdist.worker.runtime.reachable import reachable
from nbdist.worker.runtime.shell import engine_shell, store_source
from nbdist.worker.training.loop import StepRunner
from nbdist.worker.training.step_contract import StepStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from nbdist.worker.data.batches import Batch, RankRows
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.runtime.stop_point import StopPoint


class NotCompiledError(Exception):
    """A step that the framework cannot compile, or that fails on a part of a batch: the reason."""


class LiftedStep(StepStrategy, Protocol):
    """Step of a training loop in one framework.

    Attributes:
        common: True if all ranks must have the same first batch.
    """

    common: bool

    @property
    def takes_own_rows(self) -> bool:
        """True if a rank needs its own rows of the following batches only."""
        ...

    def batch(self, arguments: Arguments) -> Batch:
        """Return this rank's part of the arguments, and select the program for them."""
        ...

    def ready(self, batch: Batch) -> None:
        """Compile the step for a batch, and try it if a trial is due.

        Raises:
            NotCompiledError: it cannot be compiled. The variables have not changed.
        """
        ...

    def rebind(self, values: dict[str, Any]) -> bool:
        """Use other values for the names that the step reads; return False if it cannot."""
        ...

    def constants(self, *, begins: bool = True) -> dict[str, Any]:
        """Return the values behind the step's functions that its program contains, by path.

        Args:
            begins: True at the first step of a pass through the loop.
        """
        ...

    def header(self) -> str:
        """Describe the first step: its line, its data, and how the replicas share it.

        Empty if a warning has said it.
        """
        ...

    def outputs(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Return outputs of the last step that the body reads, over all replicas."""
        ...

    def assigned(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the names that the last step has assigned, over all replicas."""
        ...

    def last(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Return other outputs of the last step, over all replicas."""
        ...


class Arguments:
    """Values of one step.

    Attributes:
        given: values that the loop or other statements of the body bind.
        carried: values that the previous step assigned.
    """

    def __init__(self, given: tuple[Any, ...], carried: tuple[Any, ...]) -> None:
        self.given = given
        self.carried = carried


MakeStep = Callable[
    [StepRequest, LoopProgram, dict[str, Any], Arguments, LiftedStep | None], LiftedStep
]
"""Creates the step of a loop from the user's namespace, with the values that the step reads.

The last argument is an earlier step with other metrics; None if other values changed too. It
raises `NotCompiledError` like `LiftedStep.ready`.
"""


class _WrittenStep:
    """Step that runs as a function of Python, because it is not compiled.

    Args:
        function: the step.
        note: reports that it is not compiled, after its first call. An error of the user's code is
            thus the only output.
    """

    def __init__(self, function: Callable[..., Any], note: Callable[[], None]) -> None:
        self._function = function
        self._note: Callable[[], None] | None = note
        self._found: dict[str, Any] = {}

    def run(self, values: dict[str, Any], arguments: Arguments) -> None:
        """Run the step with the values of the names that it reads."""
        self._function.__globals__.update(values)
        _, found = self._function(*arguments.given, *arguments.carried)
        self._found = without_unassigned(found)
        if self._note is not None:
            self._note()
            self._note = None

    def outputs(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Return values that the last call assigned."""
        return tuple(self._found[name] for name in names)

    def assigned(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the names that the last call assigned."""
        return {name: self._found[name] for name in names if name in self._found}


class Unlimited:
    """Data whose size only the loop knows.

    Args:
        common: True if all ranks must have the same first batch.
        sharding: description of the distribution of samples to ranks.
    """

    samples = steps = -1

    def __init__(self, *, common: bool, sharding: str) -> None:
        self.common = common
        self.sharding = sharding


class LiftedLoop:
    """Steps of a training loop in one cell. Each pass through the loop is an epoch.

    Args:
        worker: this rank.
        program: the loop.
        make: creates the step.
        rank_rows: rows of this rank in a batch; None if it reads whole batches.

    Attributes:
        ran: True if the last pass ran a step.
    """

    def __init__(
        self,
        worker: Worker,
        program: LoopProgram,
        make: MakeStep,
        rank_rows: RankRows | None = None,
    ) -> None:
        self.ran = False
        self._worker = worker
        self._program = program
        self._make = make
        self._passing = contextlib.ExitStack()
        self._runner: StepRunner | None = None
        self._step: LiftedStep | None = None
        self._written: _WrittenStep | None = None
        self._values: dict[str, Any] = {}
        every = program.batches.every
        self._batches = LoopBatches(program.place, rank_rows if every else None, every)
        worker.ending.callback(self._batches.finish)
        # Only the first training of a cell saves its state.
        state = worker.cell_state
        is_first = not state.loops and state.fits is None
        self._saving = worker.request.saving if is_first else None
        kept = [name for name in program.loop.kept_outside if name not in every]
        self._passes = LoopPasses(of_cell(worker) if is_first else None, program.own_names, kept)
        self._stops: bool | None = None
        self._ended_at = 0.0

    def __enter__(self) -> LiftedLoop:
        self.ran = False
        self._passes.enter()
        worker = self._worker
        self._stop = _stop_of_cell(worker)
        if self._written is None:
            self._passing.enter_context(worker.interrupts.deferred_to_step())
        if self._runner is not None and self._runner.at.epoch < self._passes.epoch:
            self._runner.at = Position(
                step=self._runner.at.step, epoch=self._passes.epoch, batches=0
            )
        worker.progress.trained = self._written is not None
        self._ended_at = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._passing.close()
        self._passes.exit()
        if kind is None and self._runner is not None and self.ran and self._written is None:
            self._runner.end_epoch(self._passes.epoch)
        self._worker.progress.trained = True

    @property
    def restored(self) -> dict[str, Any]:
        """Local names that a resumed run assigns in this pass."""
        return self._passes.restored

    def skips(self) -> bool:
        """Begin a pass. Return True if a resumed run skips it, because its checkpoint contains it.

        The caller is the user's function or cell.
        """
        if not self._passes.are_saved or self._written is not None:
            return False
        frame, runner = sys._getframe(1), self._runner
        resumes = self._passes.is_behind
        if self._passes.begin_pass(frame):
            self._worker.progress.tested += 1
            return True
        if resumes:
            self._note_early_reads(frame)
        if runner is not None:
            self._count_steps(runner)
            self._stops = runner.must_stop()
        if runner is None or self._stops or runner.is_due():
            self._passes.note_position(frame)
        return False

    def _note_early_reads(self, frame: FrameType) -> None:
        """Warn that the first resumed pass reads models before its step restores them."""
        space = {**frame.f_globals, **frame.f_locals}
        for path, value in reachable(self._program.read_before, space, most=MOST_ITEMS):
            if hasattr(value, "trainable_variables"):
                text = (
                    f"{self._program.place}: nbdist restores `{path}` in the step, but this pass "
                    "reads it before: its first resumed step may differ from a run without a "
                    "failure. Read it in the step, or after it"
                )
                self._worker.reporter.note_once("checkpoint", text, warning=True)
                return

    def batches(self, data: Any) -> Iterable[Any]:
        """Return the batches of the loop, which contain this rank's rows if it reads its own only.

        The caller is the user's function or cell.
        """
        return self._batches.of(data, sys._getframe(1).f_globals)

    numpy_batches = staticmethod(numpy_batches)
    whole = staticmethod(whole)
    call = staticmethod(call)
    row_function = RowFunction

    @staticmethod
    def if_bound(read: Callable[[], Any]) -> Any:
        """Return the value of a name that the loop binds in an `if`; None if it has not yet."""
        try:
            return read()
        except NameError:
            return None

    def is_over(self, *, begins: bool) -> bool:
        """Return True if a resumed run must leave the loop, as the saved run did."""
        return self._passes.is_over(begins=begins)

    def exhausted(self) -> bool:
        """Note that the loop has no further pass. Return True if what follows is skipped."""
        return self._passes.exhausted()

    def leave(self) -> None:
        """Leave out the rest of the pass around, if a resumed run skips it.

        Raises:
            PassSkipped: the loop around continues with its next pass.
        """
        self._passes.leave()

    def _count_steps(self, runner: StepRunner) -> None:
        """Count the steps of other loops of the cell: all steps have different numbers."""
        if runner.at.step < (made := self._worker.progress.step):
            runner.at = structs.replace(runner.at, step=made)

    def step(
        self,
        given: tuple[Any, ...],
        carried: tuple[Any, ...],
        reads: dict[str, Callable[[], Any]],
    ) -> tuple[Any, ...]:
        """Run the step on all replicas, and return the outputs that the body reads.

        Args:
            given: values of the names in `given` of the loop.
            carried: values of the carried names.
            reads: functions that return the values of the names that the step reads.
        """
        if self._runner is None:  # ranks compare the first batch
            if self._batches.has_read_all:
                self._batches.stop()
            given = tuple(map(whole, given))
        arguments = Arguments(given, carried)
        if self._written is None:
            try:
                return self._lifted(reads, arguments)
            except NotCompiledError as error:
                self._use_written(error)
        assert self._written is not None
        self._written.run(_read(reads), Arguments(tuple(map(whole, given)), carried))
        self.ran = True
        return self._written.outputs(self._program.returned)

    def _lifted(self, reads: dict[str, Callable[[], Any]], arguments: Arguments) -> tuple[Any, ...]:
        """Run the step on all replicas."""
        waited_s = time.perf_counter() - self._ended_at
        is_first = self._runner is None
        step, runner = self._prepared(reads, arguments)
        batch = step.batch(arguments)
        if not runner.has_begun:
            saves_variables = self._passes.are_saved and not self._passes.lacking
            runner.begin(batch, saves_variables=saves_variables)
        step.ready(batch)
        if is_first:
            self._warn_of_checkpoints()
        self._count_steps(runner)
        runner.run(batch, waited_s, stops=self._stops)
        if not step.takes_own_rows:  # for example, a trial has failed on parts of a batch
            self._batches.stop()
        if is_first:
            self._note_first(step)
        self.ran = True
        outputs = step.outputs(self._program.returned)
        self._ended_at = time.perf_counter()
        return outputs

    def _note_first(self, step: LiftedStep) -> None:
        """Describe the first step after it has run: an error of it comes alone."""
        if header := step.header():
            own = self._batches.sharding
            own = "" if own == BY_ELEMENT else f", {own}"
            self._worker.reporter.note("strategy", header + own)

    def _warn_of_checkpoints(self) -> None:
        """Warn before the first step of values that checkpoints would lack."""
        program, reporter = self._program, self._worker.reporter
        if self._worker.request.saving is not None and self._saving is None:
            text = (
                f"{program.place}: checkpoints contain only the first training of the cell: a "
                "resumed run repeats the whole loop"
            )
            reporter.note("checkpoint", text)
        if self._saving is not None and program.loop.hidden_reads:
            named = ", ".join(f"`{name}`" for name in program.loop.hidden_reads)
            text = (
                f"{program.place}: checkpoints lack {named}, because a function reads it as a "
                "global name: pass it to the function as an argument"
            )
            reporter.note("strategy", text, warning=True)
        if self._saving is not None and (read := program.late_read.split("\n")[0]):
            text = (
                f"{program.place}: a resumed run does not repeat `{read}` for the steps that it "
                "skips: move it before the step"
            )
            reporter.note("checkpoint", text, warning=True)
        if self._passes.lacking:
            named = ", ".join(f"`{name}`" for name in self._passes.lacking)
            text = (
                f"{program.place}: checkpoints lack {named}, which the loop changes outside of the "
                "step that nbdist divides: change it in the function that takes the gradient"
            )
            reporter.note("strategy", text, warning=True)

    def _use_written(self, error: NotCompiledError) -> None:
        """Run the step as written from now on, and warn."""
        if self._step is not None:
            self._step.finish()
        self._passing.close()  # the cell stops at once, as without steps
        self._worker.progress.trained = True
        text = (
            f"{self._program.place}: every worker computes the whole loop as written, because "
            f"nbdist cannot compile its step ({error})"
        )
        note = functools.partial(self._worker.reporter.note, "strategy", text, warning=True)
        self._written = _WrittenStep(defined(self._program, self._program.namespace), note)

    def assigned(self) -> dict[str, Any]:
        """Return the values of the names that the last step has assigned under a condition."""
        step = self._step if self._written is None else self._written
        assert step is not None
        return step.assigned(self._program.loop.conditional)

    def last(self) -> tuple[Any, ...]:
        """Return the outputs of the last step that the body does not read."""
        names, shown = self._program.loop.outputs, self._program.returned
        rest = [name for name in names if name not in shown]
        if self._written is not None:
            return self._written.outputs(rest)
        assert self._step is not None
        return self._step.last(rest)

    def _prepared(
        self, reads: dict[str, Callable[[], Any]], arguments: Arguments
    ) -> tuple[LiftedStep, StepRunner]:
        """Return the step for the values that it reads."""
        values = _read(reads)
        before, step = self._runner, self._step
        if before is None or step is None:
            step, self._runner = self._compiled(values, arguments, None)
            self._runner.resume()
            self._worker.ending.callback(self._finish)
            self._worker.ending.push(self._end)
            return step, self._runner
        values |= step.constants(begins=not self.ran)
        if _are_same(values, self._values) or step.rebind(values):
            self._values = values
            return step, before
        like = step if self._has_new_metrics(values) else None
        before.settle()
        step.finish()
        self._note_change(values)
        step, self._runner = self._compiled(values, arguments, like)
        self._runner.continue_from(before)
        return step, self._runner

    def _compiled(
        self, values: dict[str, Any], arguments: Arguments, like: LiftedStep | None
    ) -> tuple[LiftedStep, StepRunner]:
        request = _request(self._program, check=self._checks)
        namespace = {**self._program.namespace, **values}
        self._step = step = self._make(request, self._program, namespace, arguments, like)
        self._values = values | step.constants()
        if not step.takes_own_rows:
            self._batches.stop()
        extent = Unlimited(common=step.common, sharding=self._batches.sharding)
        return step, StepRunner(
            self._worker,
            request.options,
            step,
            extent,
            self._stop,
            self._saving,
            self._passes.packed_position,
        )

    def _note_change(self, values: dict[str, Any]) -> None:
        """Note the first plain value whose change makes nbdist compile the step again."""
        for path, value in values.items():
            if isinstance(value, PLAIN) and value != self._values.get(path):
                place, name = self._program.place, path.rpartition(":")[2].removesuffix(CONTENTS)
                text = f"{place}: the step is compiled again for each value of `{name}`"
                self._worker.reporter.note_once("strategy", f"{text}: use a tf.Variable")
                return

    def _has_new_metrics(self, values: dict[str, Any]) -> bool:
        """Return True if only metrics and plain values have changed, as in each epoch of a loop."""
        keras, before = sys.modules.get("keras"), self._values
        kinds = PLAIN if keras is None else (*PLAIN, keras.metrics.Metric)
        return all(
            value is before.get(name) or isinstance(value, kinds) for name, value in values.items()
        )

    @property
    def _checks(self) -> bool:
        """True if the cell has the option `--check`."""
        step = self._worker.request.options.step
        return step is not None and step.check

    def _end(self, *raised: Any) -> None:
        if self._runner is not None and self._written is None:
            self._runner.end(*raised)

    def _finish(self) -> None:
        if self._step is not None and self._written is None:
            self._step.finish()


def _read(reads: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the values of names that have one; only some paths of the step read the others."""
    try:
        return {name: value() for name, value in reads.items()}
    except NameError:
        values = {}
        for name, value in reads.items():
            with contextlib.suppress(NameError):
                values[name] = value()
        return values


def _are_same(values: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return True if a program that contains the values is right for the others too."""
    return values.keys() == others.keys() and all(
        value is others[name] or is_same(value, others[name]) for name, value in values.items()
    )


def _stop_of_cell(worker: Worker) -> StopPoint:
    """Return the last step before a stop, for all loops of the cell."""
    state = worker.cell_state
    if state.loop_stop is None:
        state.loop_stop = worker.ending.enter_context(state.stop_point())
    return state.loop_stop


def _request(program: LoopProgram, *, check: bool) -> StepRequest:
    loop = program.loop
    options = StepOptions(data=program.data, check=check)
    return StepRequest(
        StepProgram(
            body="",
            given=tuple(loop.given),
            reads=loop.reads,
            carried=(),
            carried_lines={},
            report="",
        ),
        structs.replace(options, epochs=0, on_nan="warn"),
    )


def split_header(program: LoopProgram, rows: int, replicas: int) -> str:
    """Describe a loop whose steps split their batches over replicas; `rows` are of the first."""
    steps = f"{program.place}: steps over `{program.data}` on"
    if replicas == 1:
        return f"{steps} one replica"
    return f"{steps} {replicas} replicas, {rows:,} samples a batch, {rows // replicas:,} on each"


def without_unassigned(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the names that a step has assigned (`rewrite.step_source`)."""
    return {name: value for name, value in outputs.items() if value is not ...}


def defined(program: LoopProgram, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Define the step function of a loop, with source for tracebacks and for AutoGraph."""
    filename = _named(program)
    own: dict[str, Callable[..., Any]] = {}  # the user may have a function of the same name
    exec(compile(program.source, filename, "exec", dont_inherit=True), namespace, own)  # noqa: S102
    return own["step"]


def _named(program: LoopProgram) -> str:
    """Store the source of a step for tracebacks, and return a file name for it."""
    if not program.file:
        label = context.current().request.label
        return str(engine_shell().compile.cache(program.source, label))
    return store_source(f"{program.file}, step of {program.place}", program.source)
