"""A step under MultiWorkerMirroredStrategy: `tf.function` around `strategy.run`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.errors import PlanError, StepError
from nbdist.worker.keras.optimizer_config import flags, hyperparameters_of
from nbdist.worker.profiling.trace import NoTracer
from nbdist.worker.runtime.reachable import names_in
from nbdist.worker.tensorflow.checkpoint import TensorFlowState
from nbdist.worker.tensorflow.compiled_step import CompiledStep
from nbdist.worker.tensorflow.keras_objects import KerasObjects
from nbdist.worker.tensorflow.learning_rate import NO_RATES, ScaledRates
from nbdist.worker.tensorflow.parity import MirroredSubject
from nbdist.worker.tensorflow.replica.finite import FiniteWatch, LossScaling
from nbdist.worker.tensorflow.replica.signals import signals_of
from nbdist.worker.tensorflow.replica_state import EqualVariables
from nbdist.worker.tensorflow.runtime.rank_gather import Gather

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from nbdist.records import Plan, Precision, Rate, StepRequest
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.tensorflow.learning_rate import Rates
    from nbdist.worker.tensorflow.step_outputs import StepOutputs
    from nbdist.worker.training import step_contract
    from nbdist.worker.training.parity import Findings


class MirroredStep:
    """Step body on every replica, with the arithmetic of one device.

    Args:
        request: request for the step.
        define: defines a function from its source, in the user's namespace and under the cell's
            name.
        namespace: namespace of the user.
        strategy: strategy of all ranks.
        precision: precision of Keras layers. None leaves their own precision.
        outputs: combines the values that the step assigns; None if nothing else reads them.

    Raises:
        StepError: an object was created outside of the strategy's scope, or cannot be compiled.
    """

    reduced = False
    plan: Plan | None = None
    footprint: step_contract.Footprint | None = None
    _is_cell = True

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        namespace: dict[str, Any],
        strategy: tf.distribute.Strategy,
        precision: Precision | None,
        outputs: StepOutputs | None = None,
    ) -> None:
        self.shards = self.replicas = int(strategy.num_replicas_in_sync)
        self.tracer: Tracer = NoTracer()
        self._strategy = strategy
        self._objects = KerasObjects(request, namespace, strategy)
        self._objects.check_scope()
        if outputs is None:  # a loop has built the models that its step calls
            self._objects.check_built()
        self._objects.build_optimizers()
        _refuse_jit(request, self.replicas)
        self._flags = flags(self._objects.roots())
        self._undo = contextlib.ExitStack()
        self._rates: Rates = NO_RATES
        scales = precision == "float16" and not self._objects.scales_loss_itself()
        self._watch = LossScaling(strategy) if scales else FiniteWatch()
        recorder = signals_of(strategy, lambda: dict(self._objects.optimizers))
        self._compiled = CompiledStep(request, define, strategy, self._watch, outputs, recorder)
        self._gather = Gather(strategy)
        self._undo.enter_context(self._objects.computing_in(precision))

    @property
    def changes(self) -> tuple[str, ...]:
        return names_in(self._objects.roots())

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        return hyperparameters_of(dict(self._objects.optimizers))

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        scaled = ScaledRates(self._objects, self._strategy, self.replicas, warmup_steps, made)
        self._undo.callback(scaled.restore)
        self._rates = scaled
        return scaled.rates

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        return self._gather(numbers)

    def check(self, batch: Batch) -> Findings:
        return self._subject(self._compiled, batch).compare(batch, self.replicas)

    def _subject(self, compiled: CompiledStep, batch: Batch) -> MirroredSubject:
        """Return the trial of a compiled step."""
        return MirroredSubject(
            self._strategy,
            variables=compiled.variables(batch),
            names=self._objects.variables(),
            optimized=self._objects.optimized(),
            coarse=self._objects.is_coarse(),
            together=compiled.together,
            alone=compiled.alone,
            outputs=compiled.compared,
        )

    def layout(self, batch: Batch) -> Plan:
        raise PlanError(
            "the mirrored strategy keeps the whole model on every device, so there is no plan: use "
            "--strategy pjrt"
        )

    def prepare(self, batch: Batch) -> None:
        """Do nothing: the state is complete, because a step cannot create variables."""

    def state(self) -> TensorFlowState:
        extra = self._watch.variables()
        roots = self._objects.roots()
        scales = (("loss scale", variable) for variable in extra)
        alike = EqualVariables(roots, scales, of_step=self._is_cell)
        return TensorFlowState(roots | self._beside(roots), extra, alike=alike, facts=self._facts)

    def _beside(self, roots: dict[str, Any]) -> dict[str, Any]:
        """Return further objects for checkpoints, by name. A step cell has none."""
        del roots
        return {}

    def _facts(self) -> dict[str, object]:
        return {**self._flags, "--scale-lr": self._rates.factor}

    def step(self, batch: Batch) -> Any:
        self._rates.next_step()
        return self._compiled(batch)

    def read(self, report: Any) -> step_contract.StepResult:
        return self._compiled.read(report)

    def compilations(self) -> int:
        return self._compiled.tracings()

    def write_back(self) -> None:
        """Do nothing: the state is in variables."""

    def finish(self) -> None:
        """Undo the changes to optimizers and layers. The state stays in its variables."""
        self._undo.close()


def _refuse_jit(request: StepRequest, replicas: int) -> None:
    if request.options.jit and replicas > 1 and not tf.config.list_physical_devices("GPU"):
        raise StepError(
            "--jit: TensorFlow's XLA has no collectives between CPUs, and this step has "
            f"{replicas} replicas: remove --jit, or use --strategy pjrt (JAX always compiles)"
        )
