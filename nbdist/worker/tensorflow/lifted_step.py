"""Step of a training loop under the mirrored strategy."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import optree
import tensorflow as tf

from nbdist.errors import NbdistError
from nbdist.worker.data.batch_array import BatchArray, whole
from nbdist.worker.data.batches import Batch, RankRows
from nbdist.worker.lifting.host_draws import HostGenerators
from nbdist.worker.lifting.lifted_loop import NotCompiledError, defined, split_header
from nbdist.worker.runtime import context
from nbdist.worker.runtime.reachable import of_kinds
from nbdist.worker.runtime.shell import engine_shell
from nbdist.worker.tensorflow.compiled_step import CompiledStep
from nbdist.worker.tensorflow.keras_objects import WITH_VARIABLES
from nbdist.worker.tensorflow.loop_trials import OF_THE_STEP, LoopTrials, reason
from nbdist.worker.tensorflow.metric_exchange import BoundValues, exchange
from nbdist.worker.tensorflow.object_building import build_objects
from nbdist.worker.tensorflow.replica.inlined_functions import converted
from nbdist.worker.tensorflow.step import MirroredStep
from nbdist.worker.tensorflow.step_outputs import StepOutputs
from nbdist.worker.tensorflow.user_objects import objects_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nbdist.records import StepRequest
    from nbdist.worker.lifting.lifted_loop import Arguments
    from nbdist.worker.lifting.rewrite import LoopProgram
    from nbdist.worker.training.parity import Findings


_DRAWS = "it draws from a generator of NumPy: draw in the body of the loop, before the step"


class _Kind:
    """Arguments of a step: their structure, the values that are no arrays, and the arrays to split.

    Arrays that a step receives from its loop are split among the replicas if they all have the same
    number of rows. Otherwise every replica computes the whole step.

    Args:
        arguments: the arguments.

    Attributes:
        rows: number of rows of the arrays to split; 0 if none is split.
        divided: number of arrays to split.
        key: equal for arguments that differ only in their arrays.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._flat, count = [*arguments.given, *arguments.carried], len(arguments.given)
        self._structure: optree.PyTreeSpec | None = None
        if not all(map(_is_array, self._flat)):
            self._flat, self._structure = _flattened((arguments.given, arguments.carried))
            count = self._structure.child(0).num_leaves
        found = {i: _as_array(value) for i, value in enumerate(self._flat) if _is_array(value)}
        for value in found.values():
            if not isinstance(value, (np.ndarray, np.generic, tf.Tensor, BatchArray)):
                raise TypeError(f"the loop passes a {type(value).__name__} to the step")
        split = [i for i, array in found.items() if i < count and len(array.shape)]
        rows = {int(found[i].shape[0]) for i in split}
        self.rows = rows.pop() if len(rows) == 1 else 0
        split = split if self.rows else []
        self.divided = len(split)
        self._order = [*split, *(i for i in found if i not in split)]
        self._arrays = tuple(found[i] for i in self._order)
        static = [_text(value) for i, value in enumerate(self._flat) if i not in found]
        self.key = self._structure, count, *static, *self._order, self.divided

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Return the arrays; those to split come first."""
        return tuple(map(whole, self._arrays))

    def part(self, rows: slice) -> tuple[Any, ...]:
        """Return the arrays with some of the rows."""
        split, others = self._arrays[: self.divided], map(whole, self._arrays[self.divided :])
        return (*(_rows_of(array, rows) for array in split), *others)

    def body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step as a function of the arrays."""

        def call(*arrays: Any) -> Any:
            flat = list(self._flat)
            for i, array in zip(self._order, arrays, strict=True):
                flat[i] = array
            if self._structure is None:
                return function(*flat)
            given, carried = self._structure.unflatten(flat)
            return function(*given, *carried)

        # Converted, it would appear in errors as the user's code.
        kept: Callable[..., Any] = tf.autograph.experimental.do_not_convert(call)
        return kept


class _Steps:
    """Compiled steps, one for each kind of arguments.

    Args:
        create: compiles a step for arguments.
        kind: kind of the first arguments.
        first: their step.
        gather: gathers int32 numbers from all ranks.
        before: states of generators before the step was called to create variables.
        now: stores the states of generators that the step may draw from.

    Attributes:
        kind: kind of the last arguments.
        first_rows: number of rows of the first arguments to split.
        report: report of the last step.
    """

    def __init__(
        self,
        create: Callable[[_Kind], CompiledStep],
        kind: _Kind,
        first: CompiledStep,
        gather: Callable[[np.ndarray], np.ndarray],
        before: HostGenerators,
        now: Callable[[], HostGenerators],
    ) -> None:
        self.kind = kind
        self.first_rows = kind.rows
        self.report: dict[str, Any] = {}
        self._create = create
        self._gather = gather
        self._before = before
        self._now = now
        self._by_key = {kind.key: first}
        self._traced: set[tuple[CompiledStep, int, bool]] = set()

    def of(self, kind: _Kind) -> CompiledStep:
        self.kind = kind
        if kind.key not in self._by_key:
            self._by_key[kind.key] = self._create(kind)
        return self._by_key[kind.key]

    def trace(self, step: CompiledStep, batch: Batch) -> None:
        """Compile a step for a batch, unless it is compiled for this number of rows.

        Raises:
            NotCompiledError: the step of a rank has an effect that each replica would repeat.
        """
        if (known := (step, batch.rows, batch.whole)) not in self._traced:
            generators = self._now()
            effect = step.host_effect(batch)
            if generators.restore():
                if not self._traced:
                    self._before.restore()
                raise NotCompiledError(_DRAWS)
            # Only rank 0 writes summaries.
            if self._gather(np.array([bool(effect)], np.int32)).any():
                effect = effect or "acts outside of TensorFlow on another rank"
                raise NotCompiledError(f"it {effect}, which each replica would do")
            self._traced.add(known)


class MirroredLoopStep(MirroredStep):
    """Step of a loop, traced once for each kind of arguments.

    Args:
        request: request for the step.
        program: the loop.
        namespace: namespace of the user, with the values that the step reads.
        strategy: strategy of all ranks.
        first: values of the first step.
    """

    common = True
    _is_cell = False

    def __init__(
        self,
        request: StepRequest,
        program: LoopProgram,
        namespace: dict[str, Any],
        strategy: tf.distribute.Strategy,
        first: Arguments,
    ) -> None:
        written = defined(program, namespace)
        function = converted(written)
        with _not_compiled():
            reads = program.loop.reads
            before = _generators(reads, namespace)
            build_objects(
                lambda: function(*first.given, *first.carried), reads, namespace, strategy
            )
            kind = _Kind(first)
        outputs = StepOutputs(program.loop)
        body = kind.body(function)
        super().__init__(request, lambda _source: body, namespace, strategy, None, outputs)
        self._program = program
        weights = self._objects.weights()
        self._bound = BoundValues(written.__code__, program.loop.reads, namespace, weights)

        def compiled(other: _Kind) -> CompiledStep:
            body = other.body(function)
            return CompiledStep(
                request,
                lambda _source: body,
                strategy,
                self._watch,
                outputs,
                self._compiled.signals,
            )

        now = functools.partial(_generators, reads, namespace)
        self._steps = _Steps(compiled, kind, self._compiled, self.gather, before, now)
        self._trials = LoopTrials(
            self._subject,
            lambda: compiled(self._steps.kind),
            place=program.place,
            replicas=self.replicas,
            gather=self.gather,
        )

    def continue_trials(self, like: MirroredLoopStep) -> None:
        """Do not repeat the trials of a step that differs only in metrics and plain values."""
        self._trials.continue_from(like._trials)
        self._compiled.continue_from(like._compiled)

    def _beside(self, roots: dict[str, Any]) -> dict[str, Any]:
        """Return further objects of the cell, such as a target model that the loop updates."""
        kinds = (*WITH_VARIABLES, tf.Variable, keras.Variable)
        names = context.current().cell_state.names.bound()
        known = {id(value) for value in roots.values()}
        found = of_kinds(names, engine_shell().user_ns, kinds)
        return {name: value for name, value in found.items() if id(value) not in known}

    def rebind(self, values: dict[str, Any]) -> bool:
        """Use new metrics. Return False for other values, because the programs contain them."""
        metrics = self._bound.new_metrics(values)
        if metrics is None:
            return False
        for old, new in metrics:
            exchange(old, new, self._strategy)
            self._objects.replace(old, new)
        self._bound.replace(values)
        return True

    def constants(self, *, begins: bool = True) -> dict[str, Any]:
        return self._bound.behind(begins=begins)

    def header(self) -> str:
        program = self._program
        where = f"{program.place}:"
        if self._trials.was_known:
            return f"{where} every worker computes whole batches, as found by the last run"
        if self._trials.needs_whole:
            return ""  # a warning says why
        rows = self._steps.kind.rows
        if not rows:
            return f"{where} every worker computes whole steps: the loop passes no batch to them"
        if rows % self.shards:
            return (
                f"{where} every worker computes whole batches: one of {rows} rows does not divide "
                f"over {self.shards} replicas"
            )
        return split_header(program, rows, self.shards)

    def batch(self, arguments: Arguments) -> Batch:
        with _not_compiled():
            kind = _Kind(arguments)
        self._compiled = self._steps.of(kind)
        everything, divided = (lambda: kind.arrays), kind.divided
        if kind.rows and kind.rows % self.shards == 0 and not self._trials.needs_whole:
            worker = context.current()
            rank_rows = RankRows(rank=worker.rank, ranks=worker.world_size, replicas=self.shards)
            part = rank_rows.share(kind.rows, kind.part).values
            batch = Batch(part, kind.rows, whole=False, everything=everything, divided=divided)
            with _not_compiled():
                self._steps.trace(self._compiled, batch)
                if not self._trials.find_kink(self._compiled, batch):
                    return batch
        rows = kind.rows or 1
        return Batch(kind.arrays, rows, whole=True, everything=everything, divided=divided)

    @property
    def takes_own_rows(self) -> bool:
        """True if a rank needs whole batches for a few trials only."""
        rows, trials = self._steps.first_rows, self._trials
        is_divided = rows > 0 and rows % self.shards == 0
        return is_divided and not trials.needs_whole and not trials.examines_rows

    def check(self, batch: Batch) -> Findings:
        self._compiled.find_rows(batch)
        return super().check(batch)

    def ready(self, batch: Batch) -> None:
        with _not_compiled():
            self._steps.trace(self._compiled, batch)
            if not batch.whole:
                self._trials.verify(self._compiled, batch)

    def step(self, batch: Batch) -> Any:
        if self._trials.needs_whole and not batch.whole:
            rows = batch.everything()
            batch = Batch(rows, batch.rows, whole=True, everything=batch.everything)
        self._steps.report = super().step(batch)
        return self._steps.report

    def outputs(self, names: Sequence[str]) -> tuple[Any, ...]:
        found = self._compiled.outputs(self._steps.report, names)
        return tuple(found[name] for name in names)

    def assigned(self, names: Sequence[str]) -> dict[str, Any]:
        return self._compiled.assigned(self._steps.report, names)

    def last(self, names: Sequence[str]) -> tuple[Any, ...]:
        return self._compiled.last(self._steps.report, names)


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    """Turn errors of TensorFlow's compilation, and of steps on parts, into `NotCompiledError`."""
    try:
        yield
    except (NbdistError, NotCompiledError):
        raise
    except Exception as error:
        if isinstance(error, tf.errors.OpError) and not isinstance(error, OF_THE_STEP):
            raise  # for example a rank that died
        raise NotCompiledError(reason(error)) from error


def _generators(names: Iterable[str], namespace: dict[str, Any]) -> HostGenerators:
    return HostGenerators(value for _, value in objects_behind(names, namespace))


def _flattened(values: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Flatten nested values; `tf.nest` takes 20 times as long."""
    return optree.tree_flatten(values, none_is_leaf=True, namespace="keras")


def _as_array(value: Any) -> Any:
    """Return a number as TensorFlow would convert it in an operation."""
    return tf.convert_to_tensor(value) if isinstance(value, (int, float)) else value


def _is_array(value: Any) -> bool:
    if isinstance(value, (bool, str, bytes)) or value is None or _is_variable(value):
        return False
    is_own = isinstance(value, (int, float, np.ndarray, np.generic, BatchArray))
    return is_own or bool(tf.is_tensor(value))


def _is_variable(value: Any) -> bool:
    return isinstance(value, (tf.Variable, keras.Variable))


def _text(value: Any) -> str:
    """Return a text that is equal for values which a compiled step may exchange."""
    return f"variable {id(value)}" if _is_variable(value) else repr(value)


def _rows_of(array: Any, rows: slice) -> Any:
    """Return rows of an array. A tensor in host memory needs no operation of TensorFlow for it."""
    if isinstance(array, BatchArray):
        return array.part(rows)
    if (
        isinstance(array, tf.__internal__.EagerTensor)
        and array.backing_device.endswith("CPU:0")
        and array.dtype.is_numpy_compatible
        and array.dtype is not tf.string
    ):
        return np.asarray(array)[rows]
    return array[rows]
