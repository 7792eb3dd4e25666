"""Keras 3 on JAX cannot train over several processes as over one; these functions are mended.

- `_distribute_data` and `JAXEpochIterator._get_distributed_iterator` take each process's batch for
  a part of its own, and refuse rows that the devices do not divide.
- `get_data_adapter` does not know the strategy's data sets.
- `JAXTrainer.make_predict_function` leaves outputs where no process can read them all.
- `distribute_tensor` takes values that differ from process to process for one, as the weights of
  a model that was not seeded do, and each process goes on with its own.
- `JaxVariable._initialize_with_initializer` has each process draw values of its own for some
  initializers and for large arrays, and puts them together as one array: each goes on with
  its own, too.
- `clear_session` drops the distribution in the middle of its scope.

Seen with Keras 3.15.1 and JAX 0.10.2; `tests/worker/jax/keras/test_fit.py` fails when one of them
is no longer needed. Only what runs in the scope of a strategy of ours is changed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import zlib
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from keras.src.backend.jax import core as keras_core
from keras.src.backend.jax import distribution_lib
from keras.src.backend.jax import trainer as keras_trainer
from keras.src.initializers.random_initializers import RandomInitializer
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from nbdist.errors import StrategyError
from nbdist.worker.jax.arrays.distributed_dataset import DistributedDataset
from nbdist.worker.jax.runtime import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.jax.arrays.distributed_dataset import Placement, Tree

PATCHED_SERIES = "3.15."
_CONSTANT = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)
_BITS = 0xFFFFFFFF
_log = logging.getLogger(__name__)
_distribute_data_upstream = keras_trainer._distribute_data
_iterator_upstream = keras_trainer.JAXEpochIterator._get_distributed_iterator
_adapter_upstream = data_adapters.get_data_adapter
_make_predict_upstream = keras_trainer.JAXTrainer.make_predict_function
_distribute_tensor_upstream = distribution_lib.distribute_tensor
_initialize_upstream = keras_core.JaxVariable._initialize_with_initializer
_clear_upstream = keras.utils.clear_session
_placements: list[tuple[Any, Placement]] = []


@functools.cache
def apply() -> bool:
    """Mend the versions that were tested; say so, and leave it, where the version is another.

    Returns:
        Whether they are mended.
    """
    if not keras.__version__.startswith(PATCHED_SERIES):
        _log.warning(
            "Keras %s on JAX trains on each rank by itself: only %sx is known to work over ranks",
            keras.__version__,
            PATCHED_SERIES,
        )
        return False
    keras_trainer._distribute_data = _distribute_data
    keras_trainer.JAXEpochIterator._get_distributed_iterator = _get_distributed_iterator
    data_adapters.get_data_adapter = _get_data_adapter
    keras_trainer.JAXTrainer.make_predict_function = _make_predict_function
    distribution_lib.distribute_tensor = _distribute_tensor
    keras_core.JaxVariable._initialize_with_initializer = _initialize_with_initializer
    keras.utils.clear_session = keras.backend.clear_session = _clear_session
    return True


@contextlib.contextmanager
def over(distribution: Any, placement: Placement) -> Iterator[None]:
    """While `distribution` is Keras's current one, batches go where `placement` says."""
    _placements.append((distribution, placement))
    try:
        yield
    finally:
        _placements.pop()


def current() -> Placement | None:
    """Where batches go; None outside of a strategy's scope, or where the user set another."""
    distribution, placement = _placements[-1] if _placements else (None, None)
    return placement if keras.distribution.distribution() is distribution else None


def _distribute_data(data: Any, layouts: Any = None) -> Any:
    placement = current()
    if placement is None:
        return _distribute_data_upstream(data, layouts)
    return placement.place(placement.cut_global(data))


def _get_distributed_iterator(self: Any, distribution: Any) -> Iterator[Tree]:
    placement = current()
    if placement is None:
        yield from _iterator_upstream(self, distribution)
        return
    if isinstance(self.data_adapter, _OwnData):
        yield from self.data_adapter.get_jax_iterator()
        return
    if isinstance(self.data_adapter, ArrayDataAdapter):
        _draw_alike()
    batches = self.data_adapter.get_jax_iterator()
    first = list(itertools.islice(batches, 1))
    _refuse_different(first)
    for batch in itertools.chain(first, batches):
        yield placement.place(placement.cut_global(batch))


def _draw_alike() -> None:
    """The order of shuffled arrays is drawn from NumPy's global state: process 0's, for all."""
    state: Any = np.random.get_state(legacy=False)
    agreed = processes.agree([*state["state"]["key"].tolist(), state["state"]["pos"]])
    if (agreed != agreed[0]).any():
        *key, position = agreed[0].tolist()
        state["state"] = {"key": np.asarray(key, np.uint32), "pos": position}
        np.random.set_state(state)


def _refuse_different(first: list[Tree]) -> None:
    """Global batches that differ would be mixed into one: some samples twice, others never."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(first)]
    digest = functools.reduce(lambda crc, leaf: zlib.crc32(leaf.tobytes(), crc), leaves, 0)
    if len(np.unique(processes.agree([digest, *(len(leaf) for leaf in leaves)]), axis=0)) > 1:
        raise StrategyError(
            "the ranks were given different data, and each takes its part of the same batches: "
            "shuffle with the same seed on every rank, or give each rank its own part with "
            "strategy.distribute_datasets_from_function"
        )


class _OwnData(DataAdapter):  # type: ignore[misc]
    """A data set of the strategy's, for Keras."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def get_jax_iterator(self) -> Iterator[Tree]:
        return self._dataset.arrays()

    @property
    def num_batches(self) -> int | None:
        return self._dataset.steps

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None


def _get_data_adapter(x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
    if not isinstance(x, DistributedDataset):
        return _adapter_upstream(x, y, sample_weight, **kwargs)
    given = {"y": y, "sample_weight": sample_weight, "class_weight": kwargs.get("class_weight")}
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise StrategyError(
            f"{', '.join(extra)} beside a distributed data set: put it into the batches, as "
            "(x, y, sample_weight)"
        )
    return _OwnData(x)


def _make_predict_function(self: Any, force: bool = False) -> Any:
    """Outputs are gathered on every process, batch for batch."""
    made = self.predict_function is None or force
    _make_predict_upstream(self, force)
    if made:
        self.predict_function = functools.partial(_predict, self.predict_function)
    return self.predict_function


def _predict(predict: Callable[..., Any], state: Any, iterator: Any) -> Any:
    outputs, state = predict(state, iterator)
    placement = current()
    return (outputs if placement is None else placement.gather(outputs)), state


def _distribute_tensor(tensor: Any, layout: Any) -> Any:
    """A variable's value is process 0's, as the chief's is under TensorFlow."""
    local = not isinstance(tensor, jax.core.Tracer) and (
        not isinstance(tensor, jax.Array) or tensor.is_fully_addressable
    )
    if local and current() is not None and jax.process_count() > 1:
        tensor = processes.chiefs(np.asarray(tensor))
    return _distribute_tensor_upstream(tensor, layout)


def _initialize_with_initializer(self: Any, initializer: Any) -> None:
    """Drawn as this process's own, and given out by `_distribute_tensor`.

    What is computed in the scope of a mesh looks like one array of all processes, whatever is in
    each part. A variable that is cut is drawn in parts, where all draw alike.
    """
    if current() is None or jax.process_count() == 1:
        _initialize_upstream(self, initializer)
        return
    self._initialize_layout()
    sharding = getattr(self._layout, "backend_layout", self._layout)
    if sharding.is_fully_replicated or not _seed_alike(initializer):
        self._initialize(np.asarray(initializer(self._shape, dtype=self._dtype)))
        return
    draw = functools.partial(initializer, self._shape, dtype=self._dtype)
    self._value = jax.jit(draw, out_shardings=sharding)()


def _seed_alike(initializer: Any) -> bool:
    """Give process 0's seed to an initializer of Keras's.

    Returns:
        Whether all draw the same then: what draws from a generator, or by itself, may not.
    """
    if type(initializer) in _CONSTANT:
        return True
    seed = getattr(initializer, "seed", None)
    if not isinstance(initializer, RandomInitializer) or not isinstance(seed, int):
        return False
    initializer.seed = int(processes.agree([seed & _BITS])[0][0])
    return True


def _clear_session(free_memory: bool = True) -> None:
    distribution = keras.distribution.distribution()
    _clear_upstream(free_memory)
    keras.distribution.set_distribution(distribution)
