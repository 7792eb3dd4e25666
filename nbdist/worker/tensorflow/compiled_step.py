"""Step body compiled with `tf.function` for every replica."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.worker.data.batches import kind_of, leaves, map_arrays, rows_of
from nbdist.worker.lifting.lifted_loop import without_unassigned
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.parity import HIDDEN, single_replica
from nbdist.worker.tensorflow.replica import (
    layer_state,
    nested_merge,
    signals,
    single_device_math,
)
from nbdist.worker.tensorflow.replica.batch_share import Shares
from nbdist.worker.tensorflow.replica.inlined_functions import converted, inlined_functions
from nbdist.worker.tensorflow.replica.sample_random import Draws
from nbdist.worker.tensorflow.row_dataflow import depends_on_kinds, host_effect, kink
from nbdist.worker.tensorflow.runtime import collective_timing
from nbdist.worker.tensorflow.step_outputs import leaves_of
from nbdist.worker.tensorflow.traced_objects import TracedObjects
from nbdist.worker.tensorflow.unequal_writes import unequal_write
from nbdist.worker.training import step_contract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nbdist.records import StepRequest
    from nbdist.worker.data.batches import Batch, Tree
    from nbdist.worker.tensorflow.replica.finite import FiniteWatch, LossScaling
    from nbdist.worker.tensorflow.step_outputs import StepOutputs

FINITE = f"{HIDDEN}finite"
COLLECTIVES = f"{HIDDEN}collectives"
OUTPUTS = f"{HIDDEN}outputs"
"""Names that nbdist adds to the values that a step reports."""


class _Replicas:
    """Replicas of a strategy, and the part of a batch for each replica of this rank."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self.total = int(strategy.num_replicas_in_sync)
        self.local = len(strategy.extended.worker_devices)

    def values(self, batch: Batch) -> tuple[Any, ...]:
        """Return this rank's rows, split among its replicas if it has several."""
        local = self.local
        if local == 1 or batch.whole:
            return _as_tensors(batch.values)
        each = batch.rows // self.total

        def part_of(context: Any) -> Any:
            start = context.replica_id_in_sync_group % local * each
            own = rows_of(batch.values[: batch.divided], slice(start, start + each))
            common = () if batch.divided is None else batch.values[batch.divided :]
            return _as_tensors((*own, *common))

        per_replica: tuple[Any, ...] = self.strategy.experimental_distribute_values_from_function(
            part_of
        )
        return per_replica

    def shares(self, values: tuple[Any, ...], whole: bool) -> Shares:
        """Return the shares of a batch: parts of equal size, or the whole batch."""
        firsts = (self.strategy.experimental_local_results(leaf)[0] for leaf in leaves(values))
        rows = next((int(first.shape[0]) for first in firsts if first.shape.rank), 1)
        return Shares(rows * (1 if whole else self.total), self.total, whole=whole)


class CompiledStep:
    """Step on all replicas, traced once for each kind of batch.

    Args:
        request: request for the step.
        define: defines a function from its source, in the user's namespace and under the cell's
            name.
        strategy: strategy of all ranks.
        watch: records values that are not finite.
        outputs: combines the values that the step assigns; None if nothing else reads them.
        recorder: records signals of training.

    Attributes:
        signals: the recorder.
    """

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        strategy: tf.distribute.Strategy,
        watch: FiniteWatch | LossScaling,
        outputs: StepOutputs | None = None,
        recorder: signals.AnySignals = signals.NO_SIGNALS,
    ) -> None:
        self._request = request
        self.signals = recorder
        self._outputs = outputs
        self._shares: Shares | None = None  # None outside of `_all_replicas`
        self._last_shares = Shares(1, 1)
        self._replicas = _Replicas(strategy)
        self._watch = watch
        source = step_contract.function_source(request, request.program.given)
        self._body = converted(define(source))
        self._draws = Draws()
        self._clock = collective_timing.choose(strategy, COLLECTIVES, jit=request.options.jit)
        self._run, self._recording = self._compiled(), self._compiled(recorded=True)
        self._traced: dict[Any, Any] = {}  # by kind of batch
        self._combined: dict[Any, Callable[..., Any]] = {}  # by share of a batch
        self._objects = TracedObjects()

    def __call__(self, batch: Batch) -> Any:
        """Start a step and return its report.

        The first batch of a kind traces the step. Later batches call that trace directly, because a
        lookup by `tf.function` takes 0.12 ms per call.
        """
        values = self._values(batch)
        recorded = self.signals.prepare()
        if self._replicas.local > 1 or tf.config.functions_run_eagerly():
            run = self._recording if recorded else self._run
            return run(values, whole=batch.whole)
        kind = recorded, batch.whole, kind_of(batch.values)
        if (step := self._traced.get(kind)) is not None:
            self._objects.use(step.graph)
            return step(values, whole=batch.whole)
        with _readable_errors():
            step = self._run.get_concrete_function(values, whole=batch.whole)
            if self._outputs is None and not batch.whole and self._replicas.total > 1:
                _refuse_unequal_writes(step.graph)
            if self._draws.is_ambiguous:
                self._learn_draws(values)
            run = self._recording if recorded else self._run
            report = run(values, whole=batch.whole)
        self._traced[kind] = run.get_concrete_function(values, whole=batch.whole)
        self._objects.use(self._traced[kind].graph)
        return report

    def together(self, batch: Batch) -> Any:
        """Run a step outside of the training loop and return its report."""
        return self._run(self._values(batch), whole=batch.whole)

    def _values(self, batch: Batch) -> tuple[Any, ...]:
        self._last_shares = Shares(batch.rows, self._replicas.total, whole=batch.whole)
        return self._replicas.values(batch)

    def alone(self, values: tuple[Any, ...]) -> Any:
        """Run the body of the step on every replica, without nbdist's arithmetic around it."""
        with inlined_functions():
            return self._replicas.strategy.run(self._replica, args=values)

    def trace(self, batch: Batch) -> None:
        """Compile the step for the kind of a batch."""
        self._graph(batch)

    def variables(self, batch: Batch) -> tuple[tf.Variable, ...]:
        """Return this rank's parts of all variables that the step uses."""
        variables: tuple[tf.Variable, ...] = self._graph(batch).variables
        return variables

    def depends_on_kinds(self, batch: Batch) -> bool:
        """Return True if parts of a batch may be wrong only if it has certain rows."""
        return depends_on_kinds(self._graph(batch), batch.rows // self._replicas.total)

    def host_effect(self, batch: Batch) -> str:
        """Describe an operation of the step that acts outside of it; or return empty."""
        return host_effect(self._graph(batch))

    def kink(self, batch: Batch) -> str:
        """Describe an operation for which parts of a batch may be wrong later; or return empty."""
        rows, graph = batch.rows // self._replicas.total, self._graph(batch)
        outputs = tf.nest.flatten(graph.structured_outputs[OUTPUTS])
        decisions = [leaf for leaf in outputs if tf.is_tensor(leaf) and leaf.dtype == tf.bool]
        return kink(graph, rows, (leaf.name for leaf in decisions if not leaf.shape.rank))

    def _graph(self, batch: Batch) -> Any:
        values = self._replicas.values(batch)
        return self._run.get_concrete_function(values, whole=batch.whole).graph

    def read(self, report: Any) -> step_contract.StepResult:
        """Return the mean over this rank's own replicas."""
        reason = self._watch.reason
        if self._replicas.local == 1:
            measured = self._clock.measured(report.get(COLLECTIVES))
            ours = COLLECTIVES, OUTPUTS, signals.NAME
            found = self.signals.read(report.get(signals.NAME))
            values = {n: float(value) for n, value in report.items() if n not in ours}
            finite = bool(values.pop(FINITE))
            return step_contract.StepResult(values, finite, reason, measured, found)
        results = self._replicas.strategy.experimental_local_results
        local = {
            name: [part.numpy() for part in results(value)]
            for name, value in report.items()
            if name not in (OUTPUTS, signals.NAME)
        }
        first = tf.nest.map_structure(lambda v: results(v)[0], report.get(signals.NAME))
        finite = all(local.pop(FINITE))
        values = {name: float(np.mean(parts)) for name, parts in local.items()}
        return step_contract.StepResult(values, finite, reason, {}, self.signals.read(first))

    def outputs(self, report: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return values that a step has assigned."""
        local, assigned = self._replicas.strategy.experimental_local_results, report[OUTPUTS]
        assert self._outputs is not None
        return {
            name: tf.nest.map_structure(lambda v: local(v)[0], assigned[name])
            if name in assigned
            else self._objects.value(name, self._last_shares.total)
            for name in names
        }

    def assigned(self, report: Any, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of those of the names that the step has assigned."""
        known = {*report[OUTPUTS], *self._objects.values}
        return self.outputs(report, [name for name in names if name in known])

    def compared(self, report: Any, *, together: bool) -> dict[str, Any]:
        """Return the values of a step that a check compares, by path.

        Args:
            report: the report of the step.
            together: True if the step ran on all replicas.
        """
        if self._outputs is None:
            return {}
        found = self.outputs(report, report[OUTPUTS])
        if together:
            unread = self._outputs.unread(found)
            found |= dict(zip(unread, self.last(report, unread), strict=True))
        return leaves_of(found)

    def continue_from(self, other: CompiledStep) -> None:
        """Combine outputs as another step of the same loop does."""
        assert self._outputs is not None
        assert other._outputs is not None
        self._outputs.continue_from(other._outputs)
        self._objects.continue_from(other._objects)

    def find_rows(self, batch: Batch) -> None:
        """Find the outputs with a row for each sample, from a trace on one replica."""
        assert self._outputs is not None
        with single_replica():
            tensors = _as_tensors(batch.everything())
            step = tf.function(self.alone, autograph=False).get_concrete_function(tensors)
        self._objects.of_whole = self._outputs.others
        local = self._replicas.strategy.experimental_local_results
        assigned = step.structured_outputs[OUTPUTS]
        values = {n: tf.nest.map_structure(lambda v: local(v)[0], v) for n, v in assigned.items()}
        if self._outputs.find_rows(values, batch.rows):
            self._compile_again()
        self._combined.clear()

    def unequal(self, batch: Batch) -> str:
        """Return a name with another number or text on parts of a batch than on all of it.

        The number of rows is known. Call `find_rows` with the batch before.
        """
        return self._objects.unequal(self._graph(batch), batch.rows, self._replicas.total)

    def last(self, report: Any, names: Sequence[str]) -> tuple[Any, ...]:
        """Return values of a step that the body of its loop does not read, over all replicas."""
        assert self._outputs is not None
        combine = self._combine(self._last_shares)
        values = combine({name: report[OUTPUTS][name] for name in names if name in report[OUTPUTS]})
        local = self._replicas.strategy.experimental_local_results
        found = tf.nest.map_structure(lambda v: local(v)[0], values)
        total = self._last_shares.total
        return tuple(found[n] if n in found else self._objects.value(n, total) for n in names)

    def _combine(self, shares: Shares) -> Callable[..., Any]:
        """Return a function that combines values over replicas, traced once for each kind."""
        key = shares.total, shares.whole
        if key not in self._combined:
            outputs, strategy = self._outputs, self._replicas.strategy
            assert outputs is not None

            def combined(values: dict[str, Any]) -> dict[str, Any]:
                return {name: outputs.combined(name, v, shares) for name, v in values.items()}

            function = tf.function(lambda v: strategy.run(combined, args=(v,)), autograph=False)
            function._omit_frequent_tracing_warning = True  # the names are few
            self._combined[key] = function
        return self._combined[key]

    def add_up(self, path: str) -> None:
        """Combine a scalar of the step as a sum over replicas, in new traces."""
        assert self._outputs is not None
        self._outputs.add_up(path)
        self._compile_again()
        self._combined.clear()

    def _compile_again(self) -> None:
        self._run, self._recording = self._compiled(), self._compiled(recorded=True)
        self._traced.clear()
        self._objects.forget_traces()

    def tracings(self) -> int:
        """Return the number of times that the step was traced."""
        traced: int = self._run.experimental_get_tracing_count()
        return traced

    def _compiled(self, *, recorded: bool = False) -> Any:
        jit = self._request.options.jit or None

        def step(values: tuple[Any, ...], *, whole: bool) -> Any:
            return self._all_replicas(values, whole=whole, recorded=recorded)

        run = tf.function(step, autograph=False, jit_compile=jit)
        run._omit_frequent_tracing_warning = True  # the loop warns with a remedy
        return run

    def _learn_draws(self, values: tuple[Any, ...]) -> None:
        """Trace the step for one more row, to separate draws for rows from draws for weights.

        A step that works for only one number of rows keeps its trace.
        """
        self._draws.is_ambiguous = False

        def longer(array: Any) -> tf.TensorSpec:
            return tf.TensorSpec([array.shape[0] + 1, *array.shape[1:]], array.dtype)

        with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
            trace = tf.function(self._all_replicas, autograph=False)
            trace.get_concrete_function(map_arrays(longer, values), whole=True)
            self._compile_again()

    def _all_replicas(self, values: tuple[Any, ...], *, whole: bool, recorded: bool = False) -> Any:
        """Run the step on all replicas. Parts and whole batches have separate traces."""
        shares, strategy = self._replicas.shares(values, whole), self._replicas.strategy
        with (
            replaced(self, "_shares", shares),
            inlined_functions(),
            single_device_math.arithmetic(shares, self._watch, self._draws),
            self._watch.installed(),
            self._clock.installed(),
            nested_merge.allowed(strategy),
            layer_state.separate_replicas(strategy),
            self.signals.installed() if recorded else contextlib.nullcontext(),
        ):
            report = strategy.run(self._replica, args=values)
        if self._outputs is not None:
            self._objects.note(tf.compat.v1.get_default_graph(), self._outputs.others)
        return report

    def _replica(self, *values: Any) -> dict[str, tf.Tensor]:
        self._watch.begin()
        self._clock.begin()
        self.signals.begin()
        report, assigned = self._body(*values)
        ours = {}
        if self._outputs is not None:
            assigned = without_unassigned(assigned)
            report = self._outputs.report(assigned, self._shares)
            ours[OUTPUTS] = self._outputs.over_replicas(assigned, self._shares)
        scalars = step_contract.scalars(self._request, report, tf.convert_to_tensor)
        finite = self._watch.agreed(scalars)
        ours |= self.signals.values()
        return {**scalars, FINITE: finite, **self._clock.stamps(), **ours}


def _refuse_unequal_writes(graph: tf.Graph) -> None:
    """Refuse a step cell that assigns a value of a replica's own rows to rows of a variable.

    Raises:
        StepError: names the line.
    """
    write = unequal_write(graph)
    if write is None:
        return
    frames = [f for f in write.traceback or () if f.name == "step"]
    where = f"line {frames[-1].lineno}: " if frames else ""
    raise StepError(
        f"{where}each replica would assign a value of its own rows of the batch to a slice, so the "
        "copies of the variable would differ: write the step as a training loop in a plain cell, "
        "or, for a mean over the rows, create the variable by "
        "tf.Variable(..., aggregation=tf.VariableAggregation.MEAN)"
    )


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    """Explain TensorFlow's error for replicas that synchronize in control flow or own functions."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "merge_call" not in str(error):
            raise
        lines = re.findall(r"line (\d+), in step", str(error))
        where = f"line {lines[-1]}: " if lines else ""
        raise StepError(
            f"{where}replicas synchronize here (they average a gradient or apply an optimizer) "
            "inside tf.range, tf.cond or an `if` on a tensor, and their branches may differ: move "
            "it to the top level of the cell, and use Python's range"
        ) from None


def _as_tensors(values: Tree) -> tuple[Any, ...]:
    tensors: tuple[Any, ...] = map_arrays(tf.convert_to_tensor, values)
    return tensors
