"""A step under MultiWorkerMirroredStrategy: `tf.function` around `strategy.run`."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api

from nbdist.errors import PlanError, StepError
from nbdist.worker.data.batches import kind_of, leaves, map_arrays
from nbdist.worker.keras.optimizer_config import flags
from nbdist.worker.profiling.trace import NoTracer
from nbdist.worker.runtime.reachable import names_in
from nbdist.worker.tensorflow import collective_timing
from nbdist.worker.tensorflow.checkpoint import TensorFlowState
from nbdist.worker.tensorflow.keras.objects import KerasObjects
from nbdist.worker.tensorflow.learning_rate import NO_RATES, ScaledRates
from nbdist.worker.tensorflow.parity import HIDDEN, MirroredSubject
from nbdist.worker.tensorflow.rank_gather import Gather
from nbdist.worker.tensorflow.replica import nested_merge, single_device_math
from nbdist.worker.tensorflow.replica.batch_share import Shares
from nbdist.worker.tensorflow.replica.finite import FiniteWatch, LossScaling
from nbdist.worker.tensorflow.replica.sample_random import Draws
from nbdist.worker.tensorflow.replica_state import Alike
from nbdist.worker.training import step_contract
from nbdist.worker.training.parity import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.records import Plan, Precision, Rate, StepRequest
    from nbdist.worker.data.batches import Batch, Tree
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.tensorflow.learning_rate import Rates
    from nbdist.worker.training.parity import Findings

FINITE = f"{HIDDEN}finite"
COLLECTIVES = f"{HIDDEN}collectives"
"""Beside the values that a step reports."""


class MirroredStep:
    """The body of the step on every replica, with the arithmetic of one device.

    Args:
        request: the step.
        define: makes a function of a source, in the user's namespace, under the cell's name.
        namespace: the user's.
        strategy: the strategy.
        precision: what Keras's layers compute in; None leaves it to them.

    Raises:
        StepError: something was made outside of the strategy's scope, or cannot be compiled.
    """

    reduced = False
    plan: Plan | None = None
    footprint: step_contract.Footprint | None = None

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        namespace: dict[str, Any],
        strategy: tf.distribute.Strategy,
        precision: Precision | None,
    ) -> None:
        self.shards = self.replicas = int(strategy.num_replicas_in_sync)
        self.tracer: Tracer = NoTracer()
        self._local = len(strategy.extended.worker_devices)
        self._strategy = strategy
        self._request = request
        self._objects = KerasObjects(request, namespace, strategy)
        self._objects.check_scope()
        self._objects.build_optimizers()
        _refuse_jit(request, self.replicas)
        self._flags = flags(self._objects.roots())
        self._undo = contextlib.ExitStack()
        self._rates: Rates = NO_RATES
        scales = precision == "float16" and not self._objects.scales_loss_itself()
        self._watch = LossScaling(strategy) if scales else FiniteWatch()
        # As tf.function converts what it calls; tf.autograph.to_graph loses the user's lines.
        self._body = api.tf_convert(
            define(step_contract.function_source(request, request.program.given)),
            ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED),
        )
        self._draws = Draws()
        self._run = self._compiled()
        self._gather = Gather(strategy)
        self._clock = collective_timing.choose(strategy, COLLECTIVES, jit=request.options.jit)
        self._traced: dict[Any, Callable[..., Any]] = {}  # by kind of batch
        self._undo.enter_context(self._objects.computing_in(precision))

    @property
    def changes(self) -> tuple[str, ...]:
        return names_in(self._objects.roots())

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        scaled = ScaledRates(self._objects, self._strategy, self.replicas, warmup_steps, made)
        self._undo.callback(scaled.restore)
        self._rates = scaled
        return scaled.rates

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        return self._gather(numbers)

    def check(self, batch: Batch) -> Findings:
        values = self._for_replicas(batch)
        traced = self._run.get_concrete_function(values, whole=batch.whole)
        subject = MirroredSubject(
            self._strategy,
            variables=traced.graph.variables,
            names=self._objects.variables(),
            slots=self._objects.slots(),
            together=lambda batch: self._run(self._for_replicas(batch), whole=batch.whole),
            alone=lambda values: self._strategy.run(self._replica, args=values),
        )
        return compare(subject, batch, self.replicas, coarse=self._objects.is_coarse())

    def layout(self, batch: Batch) -> Plan:
        raise PlanError(
            "under mirrored every device has all of the model, and nothing is to be planned: "
            "type --strategy pjrt"
        )

    def prepare(self, batch: Batch) -> None:
        """Its state is all there: a step can make no variables."""

    def state(self) -> TensorFlowState:
        extra = self._watch.variables()
        roots = self._objects.roots()
        alike = Alike(roots, (("loss scale", variable) for variable in extra))
        return TensorFlowState(roots, extra, alike=alike, facts=self._facts)

    def _facts(self) -> dict[str, object]:
        return {**self._flags, "--scale-lr": self._rates.factor}

    def step(self, batch: Batch) -> Any:
        """The first batch of a kind has the step traced; for others that trace is called itself.

        So `tf.function` is spared looking for it, which takes it 0.12 ms at every call.
        """
        self._rates.next_step()
        values = self._for_replicas(batch)
        if self._local > 1 or tf.config.functions_run_eagerly():
            return self._run(values, whole=batch.whole)
        kind = batch.whole, kind_of(batch.values)
        if kind in self._traced:
            return self._traced[kind](values, whole=batch.whole)
        with _told_in_words():
            self._run.get_concrete_function(values, whole=batch.whole)
            if self._draws.is_ambiguous:
                self._learn_draws(values)
            report = self._run(values, whole=batch.whole)
        self._traced[kind] = self._run.get_concrete_function(values, whole=batch.whole)
        return report

    def _compiled(self) -> Any:
        jit = self._request.options.jit or None
        run = tf.function(self._all_replicas, autograph=False, jit_compile=jit)
        run._omit_frequent_tracing_warning = True  # the loop says it, with what to type
        return run

    def _learn_draws(self, values: tuple[Any, ...]) -> None:
        """Trace the step for one row more, to tell draws for rows from those for weights.

        A step that is made for one number of rows keeps its trace.
        """
        self._draws.is_ambiguous = False

        def longer(array: Any) -> tf.TensorSpec:
            return tf.TensorSpec([array.shape[0] + 1, *array.shape[1:]], array.dtype)

        with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError):
            trace = tf.function(self._all_replicas, autograph=False)
            trace.get_concrete_function(map_arrays(longer, values), whole=True)
            self._run = self._compiled()

    def read(self, report: Any) -> step_contract.StepResult:
        """The mean over this rank's own replicas."""
        if self._local == 1:
            measured = self._clock.measured(report.get(COLLECTIVES))
            values = {n: float(value) for n, value in report.items() if n != COLLECTIVES}
            finite = bool(values.pop(FINITE))
            return step_contract.StepResult(values, finite, self._watch.reason, measured)
        local = {
            name: [part.numpy() for part in self._strategy.experimental_local_results(value)]
            for name, value in report.items()
        }
        finite = all(local.pop(FINITE))
        values = {name: float(np.mean(parts)) for name, parts in local.items()}
        return step_contract.StepResult(values, finite, self._watch.reason)

    def compilations(self) -> int:
        traced: int = self._run.experimental_get_tracing_count()
        return traced

    def write_back(self) -> None:
        """As below."""

    def finish(self) -> None:
        """State is in variables, which stay where they are."""
        self._undo.close()

    def _for_replicas(self, batch: Batch) -> tuple[Any, ...]:
        """This rank's rows; cut once more where it has several replicas."""
        local = self._local
        if local == 1 or batch.whole:
            return _as_tensors(batch.values)
        each = batch.rows // self.replicas

        def part_of(context: Any) -> Any:
            start = context.replica_id_in_sync_group % local * each
            return _as_tensors(map_arrays(lambda array: array[start : start + each], batch.values))

        per_replica: tuple[Any, ...] = self._strategy.experimental_distribute_values_from_function(
            part_of
        )
        return per_replica

    def _all_replicas(self, values: tuple[Any, ...], *, whole: bool) -> Any:
        """Traced once for parts of batches, once for whole ones: shapes may be the same."""
        with (
            single_device_math.arithmetic(self._shares(values, whole), self._watch, self._draws),
            self._watch.installed(),
            self._clock.installed(),
            nested_merge.allowed(self._strategy),
        ):
            return self._strategy.run(self._replica, args=values)

    def _shares(self, values: tuple[Any, ...], whole: bool) -> Shares:
        """The batch of a step has as many rows as its parts, which are of equal size."""
        first = self._strategy.experimental_local_results(leaves(values)[0])[0]
        total = int(first.shape[0]) * (1 if whole else self.replicas)
        return Shares(total, self.replicas, whole=whole)

    def _replica(self, *values: Any) -> dict[str, tf.Tensor]:
        self._watch.begin()
        self._clock.begin()
        report, _ = self._body(*values)
        scalars = step_contract.scalars(self._request, report, tf.convert_to_tensor)
        finite = self._watch.agreed(scalars)
        return {**scalars, FINITE: finite, **self._clock.stamps()}


@contextlib.contextmanager
def _told_in_words() -> Iterator[None]:
    """TensorFlow cannot let replicas meet within control flow or functions of its own."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "merge_call" not in str(error):
            raise
        lines = re.findall(r"line (\d+), in step", str(error))
        where = f"line {lines[-1]}: " if lines else ""
        raise StepError(
            f"{where}replicas meet here (a gradient is averaged, or an optimizer applied) inside "
            "of tf.range, tf.cond or an `if` of a tensor, which may differ between replicas: do it "
            "at the top level of the cell, with Python's range"
        ) from None


def _as_tensors(values: Tree) -> tuple[Any, ...]:
    tensors: tuple[Any, ...] = map_arrays(tf.convert_to_tensor, values)
    return tensors


def _refuse_jit(request: StepRequest, replicas: int) -> None:
    if request.options.jit and replicas > 1 and not tf.config.list_physical_devices("GPU"):
        raise StepError(
            "--jit: TensorFlow's XLA has no collectives between CPUs, and there are "
            f"{replicas} replicas: leave it out, or type --strategy pjrt, which always compiles"
        )
