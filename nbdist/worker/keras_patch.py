"""Keras 3 cannot `fit` under MultiWorkerMirroredStrategy; three functions are mended here.

`TensorFlowTrainer._maybe_symbolic_build` hands a PerReplica batch to code that wants tensors, and
`reduce_per_replica` averages scalar losses over an axis they do not have
(https://github.com/keras-team/keras/issues/20585). `LossScaleOptimizer.check_finite` asks each
replica about its own gradients, which are not reduced yet: where one overflows, it alone leaves the
update out, and all wait for each other for ever. Seen with Keras 3.15.1 and TensorFlow 2.21.0;
`tests/worker/test_mirrored.py` fails when the patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from nbdist.worker import keras_clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Precision

PATCHED_SERIES = "3.15."
_log = logging.getLogger(__name__)
_reduce_upstream = keras_trainer.reduce_per_replica
_finite_upstream = keras.optimizers.LossScaleOptimizer.check_finite
_build_upstream = keras_trainer.TensorFlowTrainer._maybe_symbolic_build


def apply() -> None:
    """Mend the versions that were tested; say so, and leave it, where the version is another."""
    if not keras.__version__.startswith(PATCHED_SERIES):
        _log.warning(
            "Keras %s is not mended: only %sx was tested", keras.__version__, PATCHED_SERIES
        )
        return
    keras_trainer.reduce_per_replica = _reduce_per_replica
    keras_trainer.TensorFlowTrainer._maybe_symbolic_build = _maybe_symbolic_build
    keras.optimizers.LossScaleOptimizer.check_finite = _check_finite
    keras_clock.apply()


@contextlib.contextmanager
def made_for(precision: Precision) -> Iterator[None]:
    """Layers that are made meanwhile compute in `precision`; their variables are float32."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{precision}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _check_finite(self: Any, grads: Any) -> Any:
    """Whether the gradients are finite on all replicas."""
    finite = _finite_upstream(self, grads)
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return finite
    bad = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~finite, tf.float32))
    return tf.equal(bad, 0)


def _reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
    """Reduce scalars over replicas; `concat` and `first` are right upstream."""
    chosen = "mean" if reduction == "auto" else reduction
    if not _spans_workers(strategy) or chosen not in ("mean", "sum"):
        return _reduce_upstream(values, strategy, reduction)
    return keras_clock.reduced(
        values, lambda value: strategy.reduce(chosen.upper(), value, axis=None)
    )


def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Build from what the first local replica gets."""
    strategy = self._distribute_strategy
    if iterator is None or strategy is None or not _spans_workers(strategy):
        _build_upstream(self, iterator, data_batch)
        return
    _warn_of_partial(iterator, strategy.num_replicas_in_sync)
    _, _, batches = next(iter(iterator))
    batch = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], next(batches)
    )
    with strategy.scope():
        self._symbolic_build(data_batch=batch)


def _warn_of_partial(iterator: Any, replicas: int) -> None:
    """Keras averages over replicas whatever the number of samples on each."""
    adapter = iterator.data_adapter
    if isinstance(adapter, PyDatasetAdapter):  # it does not say
        return
    partial = adapter.partial_batch_size
    if partial and partial % replicas:
        warnings.warn(
            f"the last batch has {partial} samples, which {replicas} replicas cannot share evenly: "
            "Keras weighs them wrongly, and the numbers differ from one device's; choose a "
            f"batch_size that leaves a multiple of {replicas}, or write a step cell (--data)",
            stacklevel=2,
        )


def _spans_workers(strategy: Any) -> bool:
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.extended._in_multi_worker_mode()
    )
