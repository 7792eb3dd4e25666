"""Patch of Keras 3 on JAX: train over several processes as over one.

Problems of the patched functions:

- `_distribute_data` and `JAXEpochIterator._get_distributed_iterator` treat each process's batch as
  a part of its own, and refuse rows that the devices do not divide.
- `get_data_adapter` does not know the strategy's datasets.
- `JAXTrainer.make_predict_function` leaves outputs sharded, and no process can read all of them.
- `distribute_tensor` accepts values that differ between processes, such as unseeded weights. Each
  process then continues with its own values.
- `JaxVariable._initialize_with_initializer` lets each process draw its own values for some
  initializers and for large arrays, with the same effect.
- `Trainer._symbolic_build` names no remedy for a model without `call`.
- `clear_session` removes the distribution inside its scope.

Tested with Keras 3.15.1 and JAX 0.10.2. `tests/worker/jax/keras/test_fit.py` fails when a patch is
no longer needed. The patches take effect only in the scope of an nbdist strategy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
import keras
import numpy as np

from nbdist.errors import StrategyError
from nbdist.private_api.keras import (
    PJRT_FIT,
    ArrayDataAdapter,
    DataAdapter,
    JAXTrainer,
    JaxVariable,
    RandomInitializer,
    TFDatasetAdapter,
    data_adapters,
    distribution_lib,
)
from nbdist.private_api.keras import jax_trainer as keras_trainer
from nbdist.worker.data.dataset_batches import DatasetBatches, find_batches
from nbdist.worker.jax.arrays.distributed_dataset import DistributedDataset
from nbdist.worker.jax.arrays.leaves import placed
from nbdist.worker.jax.runtime import processes
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.data.batches import Share
    from nbdist.worker.jax.arrays.distributed_dataset import Placement, Tree

_CONSTANT = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)
_BITS = 0xFFFFFFFF
_distribute_data_upstream = keras_trainer._distribute_data
_iterator_upstream = keras_trainer.JAXEpochIterator._get_distributed_iterator
_adapter_upstream = data_adapters.get_data_adapter
_make_predict_upstream = JAXTrainer.make_predict_function
_distribute_tensor_upstream = distribution_lib.distribute_tensor
_initialize_upstream = JaxVariable._initialize_with_initializer
_build_upstream = JAXTrainer._symbolic_build
_clear_upstream = keras.utils.clear_session
_datasets: WeakKeyDictionary[DataAdapter, DatasetBatches] = WeakKeyDictionary()
"""Sources of the data sets of which each process maps its own samples only."""

_placements: list[tuple[Any, Placement]] = []


@functools.cache
def apply() -> bool:
    """Patch the tested versions of Keras; for other versions log a warning.

    Returns:
        Whether Keras is patched.
    """
    if not PJRT_FIT.is_supported("models are not sharded on JAX"):
        return False
    keras_trainer._distribute_data = _distribute_data
    keras_trainer.JAXEpochIterator._get_distributed_iterator = _get_distributed_iterator
    data_adapters.get_data_adapter = _get_data_adapter
    JAXTrainer.make_predict_function = _make_predict_function
    JAXTrainer._symbolic_build = _symbolic_build
    distribution_lib.distribute_tensor = _distribute_tensor
    JaxVariable._initialize_with_initializer = _initialize_with_initializer
    keras.utils.clear_session = keras.backend.clear_session = _clear_session
    return True


@contextlib.contextmanager
def over(distribution: Any, placement: Placement) -> Iterator[None]:
    """Place batches by `placement` while `distribution` is Keras's current one."""
    _placements.append((distribution, placement))
    try:
        yield
    finally:
        _placements.pop()


def current() -> Placement | None:
    """Return the placement of batches.

    Returns None outside of a strategy's scope, or if the user set another distribution.
    """
    distribution, placement = _placements[-1] if _placements else (None, None)
    return placement if keras.distribution.distribution() is distribution else None


def _distribute_data(data: Any, layouts: Any = None) -> Any:
    placement = current()
    if placement is None:
        return _distribute_data_upstream(data, layouts)
    return placement.place(placement.own_share(data))


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
    shares = _shares(self.data_adapter, placement)
    first = list(itertools.islice(shares, 1))
    _refuse_different([everything() for _, everything in first])
    for share, _ in itertools.chain(first, shares):
        yield placement.place(share)


def _shares(
    adapter: DataAdapter, placement: Placement
) -> Iterator[tuple[Share, Callable[[], Tree]]]:
    """Yield this process's share of each batch, and a function that returns all rows."""
    if (found := _datasets.get(adapter)) is not None:
        for batch in found.batches(placement.rank_rows):
            yield batch, batch.everything
        return
    for batch in adapter.get_jax_iterator():
        yield placement.own_share(batch), functools.partial(_same, batch)


def _same(batch: Tree) -> Tree:
    return batch


def _draw_alike() -> None:
    """Copy the state of NumPy's global generator from rank 0: Keras shuffles arrays with it."""
    state: Any = np.random.get_state(legacy=False)
    agreed = processes.agree([*state["state"]["key"].tolist(), state["state"]["pos"]])
    if (agreed != agreed[0]).any():
        *key, position = agreed[0].tolist()
        state["state"] = {"key": np.asarray(key, np.uint32), "pos": position}
        np.random.set_state(state)


def _refuse_different(first: list[Tree]) -> None:
    """Refuse batches that differ between ranks: samples would be repeated and lost."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(first)]
    digest = functools.reduce(lambda crc, leaf: zlib.crc32(leaf.tobytes(), crc), leaves, 0)
    if len(np.unique(processes.agree([digest, *(len(leaf) for leaf in leaves)]), axis=0)) > 1:
        raise StrategyError(
            "the ranks were given different data, but each uses its part of the same global batch: "
            "shuffle with the same seed on every rank, or give each rank its own part with "
            "strategy.distribute_datasets_from_function"
        )


class _OwnData(DataAdapter):  # type: ignore[misc]
    """Keras data adapter of a strategy's dataset."""

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
        adapter = _adapter_upstream(x, y, sample_weight, **kwargs)
        if current() is not None and jax.process_count() > 1:
            _divide(adapter)
        return adapter
    given = {"y": y, "sample_weight": sample_weight, "class_weight": kwargs.get("class_weight")}
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise StrategyError(
            f"{', '.join(extra)} cannot be passed with a distributed dataset: put it into the "
            "batches, as (x, y, sample_weight)"
        )
    return _OwnData(x)


def _divide(adapter: DataAdapter) -> None:
    """Let each process map its own samples only of a `tf.data.Dataset` that allows it."""
    order, found = context.current().cell_state.order, None
    if type(adapter) is TFDatasetAdapter:
        found = find_batches(adapter.get_tf_dataset(), of_numpy=True)
    if found is not None:
        _datasets[adapter] = found
    order.sharding = "" if found is None else found.sharding


def _make_predict_function(self: Any, force: bool = False) -> Any:
    """Make a predict function that gathers the outputs of each batch on every process."""
    made = self.predict_function is None or force
    _make_predict_upstream(self, force)
    if made:
        self.predict_function = functools.partial(_predict, self.predict_function)
    return self.predict_function


def _predict(predict: Callable[..., Any], state: Any, iterator: Any) -> Any:
    outputs, state = predict(state, iterator)
    placement = current()
    return (outputs if placement is None else placement.gather(outputs)), state


def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Build a model, and refuse one that cannot be called: Keras on JAX builds it by a call."""
    if current() is not None and type(self).call is keras.Model.call:
        name = type(self).__name__
        if "call" not in vars(self) and not all(layer.built for layer in self._flatten_layers()):
            raise StrategyError(
                f"{name} has no call(), and Keras on JAX builds a model by a call: define call(), "
                "or set `built = True` after all its layers are built"
            )
    _build_upstream(self, iterator, data_batch)


def _distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Distribute a variable's value from rank 0, as TensorFlow does from the chief.

    An array that each process has made without a mesh, such as a counter, is not sent: a process
    may create it alone, for example to save a model.
    """
    local = not isinstance(tensor, jax.core.Tracer) and (
        not isinstance(tensor, jax.Array) or tensor.is_fully_addressable
    )
    if local and current() is not None and jax.process_count() > 1:
        sharding = getattr(layout, "backend_layout", layout)
        is_made_alike = isinstance(tensor, jax.Array) and not tensor.committed
        if is_made_alike and isinstance(sharding, jax.sharding.Sharding):
            return placed(tensor, sharding)
        tensor = processes.chiefs(np.asarray(tensor))
    return _distribute_tensor_upstream(tensor, layout)


def _initialize_with_initializer(self: Any, initializer: Any) -> None:
    """Draw a value on this process, and let `_distribute_tensor` send rank 0's to all.

    A value computed in the scope of a mesh looks like one array of all processes, even if its parts
    differ. A sharded variable is drawn in parts if all processes draw the same values.
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
    """Give rank 0's seed to a Keras initializer.

    Returns:
        Whether all processes then draw the same values. False for generators and custom
        initializers.
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
