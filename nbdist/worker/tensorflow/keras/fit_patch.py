"""Patch of Keras 3 that makes `fit` under MultiWorkerMirroredStrategy equal to one device.

The functions of Keras's trainer cannot train under this strategy
(https://github.com/keras-team/keras/issues/20585). They also shuffle each rank's data differently,
and average over replicas without regard to their rows. nbdist replaces these functions
(`worker/tensorflow/keras/train_function.py`, `worker/tensorflow/keras/inputs.py`).

`LossScaleOptimizer.check_finite` tests only the replica's own gradients. If they overflow before
they are averaged, only that replica skips the update, and all replicas deadlock.

Tested with Keras 3.15.1 and TensorFlow 2.21.0. `tests/worker/tensorflow/test_strategy.py` fails if
the patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.private_api.keras import MIRRORED_FIT, EpochIterator
from nbdist.private_api.keras import loss as keras_loss
from nbdist.private_api.keras import tensorflow_core as keras_core
from nbdist.private_api.keras import tensorflow_trainer as keras_trainer
from nbdist.worker.data.map_pushdown import SELECTED
from nbdist.worker.keras.train_function_timing import TimedFunction
from nbdist.worker.runtime import context, signals
from nbdist.worker.tensorflow.keras import inputs as keras_inputs
from nbdist.worker.tensorflow.keras import train_function
from nbdist.worker.tensorflow.keras.batches import GlobalBatches
from nbdist.worker.tensorflow.keras.row_independence import treats_rows_independently
from nbdist.worker.tensorflow.keras.train_function import ReplicatedPredict, ReplicatedStep
from nbdist.worker.tensorflow.replica import summed_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.records import Precision

_make_upstream = {
    kind: getattr(keras_trainer.TensorFlowTrainer, f"make_{kind}_function")
    for kind in ("train", "test", "predict")
}
_predict_upstream = keras_trainer.TensorFlowTrainer.predict
_predicting: ContextVar[Any] = ContextVar("_predicting", default=None)
"""Model whose `predict` has not opened its data yet; None outside of `predict`."""

_init_upstream = keras_trainer.TFEpochIterator.__init__
_build_upstream = keras_trainer.TensorFlowTrainer._maybe_symbolic_build
_scale_upstream = keras_loss.scale_loss_for_distribution
_unscale_upstream = keras_loss.unscale_loss_for_distribution
_initialize_upstream = keras_core.Variable._initialize
_strategies: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Strategy and options `--watch` of each function that was created for a model."""

_finite_upstream = keras.optimizers.LossScaleOptimizer.check_finite


def apply() -> None:
    """Patch the tested versions. Leave other versions unchanged and log a warning."""
    if not MIRRORED_FIT.is_supported("`fit` reads and averages as upstream"):
        return
    trainer = keras_trainer.TensorFlowTrainer
    trainer.make_train_function = functools.partialmethod(_make, "train", _replicated_train)
    trainer.make_test_function = functools.partialmethod(_make, "test", _replicated_test)
    trainer.make_predict_function = functools.partialmethod(_make, "predict", ReplicatedPredict)
    trainer.predict = _predict
    trainer._maybe_symbolic_build = _maybe_symbolic_build
    keras_trainer.TFEpochIterator.__init__ = _init_iterator
    keras.optimizers.LossScaleOptimizer.check_finite = _check_finite
    keras_loss.scale_loss_for_distribution = _scale_loss
    keras_loss.unscale_loss_for_distribution = _unscale_loss
    keras_core.Variable._initialize = summed_variables.initialized(_initialize_upstream)


@contextlib.contextmanager
def with_precision(precision: Precision) -> Iterator[None]:
    """Set the precision of layers created in this context. Their variables are float32."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _check_finite(self: Any, grads: Any) -> Any:
    """Return True if the gradients are finite on all replicas."""
    finite = _finite_upstream(self, grads)
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return finite
    bad = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~finite, tf.float32))
    return tf.equal(bad, 0)


def _scale_loss(value: Any) -> Any:
    """Divide by the number of replicas, but only in a replica. A plain cell acts as one device."""
    return _scale_upstream(value) if tf.distribute.get_replica_context() else value


def _unscale_loss(value: Any) -> Any:
    return _unscale_upstream(value) if tf.distribute.get_replica_context() else value


def _make(self: Any, kind: str, replicated: Callable[[Any], Any], force: bool = False) -> Any:
    """Create the function that `fit`, `evaluate` or `predict` calls for each step.

    A model without its own strategy is trained in the current scope, and a different scope needs a
    new function.
    """
    if not _is_ours(self.distribute_strategy):
        return _make_upstream[kind](self, force)
    name, strategies = f"{kind}_function", _strategies.setdefault(self, {})
    place = self.distribute_strategy, signals.is_watched(), signals.interval()
    if getattr(self, name) is None or force or strategies.get(kind) != place:
        _check_call(self, f"{kind}_step")
        setattr(self, name, replicated(self))
        strategies[kind] = place
    return getattr(self, name)


def _check_call(model: Any, step: str) -> None:
    """Check that a model can be called if its step is Keras's own.

    Raises:
        StepError: the step calls the model, and the model has no `call`.
    """
    own_step = getattr(type(model), step) is not getattr(keras.Model, step)
    if _has_no_call(model) and not own_step and step not in vars(model):
        name = type(model).__name__
        raise StepError(
            f"{name} has no call(), but Keras's {step} calls it: define call() or {step}()"
        )


def _has_no_call(model: Any) -> bool:
    return type(model).call is keras.Model.call and "call" not in vars(model)


def _replicated_train(model: Any) -> Any:
    return TimedFunction(ReplicatedStep(model, model.train_step, trains=True))


def _replicated_test(model: Any) -> Any:
    step = ReplicatedStep(model, model.test_step)
    return lambda iterator: step(iterator)[0]


def _init_iterator(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
    """Iterate over global batches that all ranks have."""
    model = _predicting.get()
    _predicting.set(None)
    if not _is_ours(distribute_strategy):
        _init_upstream(self, distribute_strategy, *args, **kwargs)
        return
    EpochIterator.__init__(self, *args, **kwargs)
    self._distribute_strategy = distribute_strategy
    batches = self._distributed_dataset = keras_inputs.batches_of(
        self.data_adapter, distribute_strategy
    )
    if model is not None and model.built and treats_rows_independently(model, predicts=True):
        _select(batches)


def _select(batches: Any) -> None:
    """Map this rank's samples only, if that is possible."""
    if isinstance(batches, GlobalBatches) and batches.select():
        context.current().cell_state.order.sharding = SELECTED


@functools.wraps(_predict_upstream)
def _predict(self: Any, *args: Any, **kwargs: Any) -> Any:
    token = _predicting.set(self)
    try:
        return _predict_upstream(self, *args, **kwargs)
    finally:
        _predicting.reset(token)


def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Build from the spec of the batches. Reading a batch would reshuffle the data set."""
    strategy = self._distribute_strategy
    if strategy is None or not _is_ours(strategy):
        _build_upstream(self, iterator, data_batch)
        return
    if _has_no_call(self):
        return  # its own `train_step` calls other models
    batches = getattr(iterator, "_distributed_dataset", None)
    if isinstance(batches, GlobalBatches):
        data_batch = batches.symbols()
    elif iterator is not None:
        _, _, elements = next(iter(iterator))
        data_batch = train_function.first_of(strategy, next(elements))
    with strategy.scope():
        _build(self, data_batch)
    if treats_rows_independently(self):
        _select(batches)


def _build(model: Any, data_batch: Any) -> None:
    """Build the model, unless a user's `train_step` takes batches that `call` does not accept.

    The step then builds the layers that it calls, as on one device.
    """
    metrics = model._compile_metrics
    are_built = metrics is None or metrics.built
    try:
        model._symbolic_build(data_batch=data_batch)
        if not are_built:
            _skip_first_reset(metrics)
    except (RuntimeError, ValueError):
        if type(model).train_step is keras.Model.train_step:
            raise


def _skip_first_reset(metrics: Any) -> None:
    """Keep initial metric values in the first epoch. One device builds metrics after the reset."""

    def skip() -> None:
        object.__delattr__(metrics, "reset_state")

    object.__setattr__(metrics, "reset_state", skip)


def _is_ours(strategy: Any) -> bool:
    """Return True for the strategy of all workers and for the strategy of a single rank."""
    return not isinstance(
        strategy,
        (
            tf.distribute.MirroredStrategy,
            tf.distribute.OneDeviceStrategy,
            tf.distribute.TPUStrategy,
            tf.distribute.experimental.ParameterServerStrategy,
            tf.distribute.experimental.CentralStorageStrategy,
        ),
    )
