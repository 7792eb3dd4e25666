"""Check that Keras's `fit`, `evaluate` and `predict` have the same inputs on all ranks.

Every rank takes its rows from global batches (`worker/tensorflow/keras/batches.py`). If these
batches differ, some samples are used twice and others never. Ranks therefore compare sampled rows
of their arrays, and the first batch of each data set. Rank 0 draws the seed for the order of an
unseeded shuffle.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from msgspec import structs

from nbdist.errors import StepError
from nbdist.private_api.keras import ArrayDataAdapter, tree
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batches import Checksums
from nbdist.worker.data.map_pushdown import find
from nbdist.worker.runtime import context
from nbdist.worker.runtime.cell_state import ShuffleOrder
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.keras.batches import Batch, GlobalBatches, Place, Selection
from nbdist.worker.tensorflow.runtime.dataset_shuffle import is_seeded_by_user
from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.worker.tensorflow.runtime.rank_gather import Gather

SAMPLED_ROWS = 256
"""Number of evenly spread rows of an array that ranks compare."""

ALL_ROWS = (
    "by element: each worker maps all samples, because nbdist compares the steps of the model with "
    "whole batches"
)
ARGUMENTS = ("x", "y", "sample_weight")
_RANDOM = ("Random", "StatelessRandom", "Multinomial", "TruncatedNormal")
"""Prefixes of the types of TensorFlow operations that draw random numbers."""


def batches_of(adapter: Any, strategy: tf.distribute.Strategy) -> Any:
    """Return global batches of Keras's inputs after the ranks have compared them.

    Args:
        adapter: data adapter of Keras.
        strategy: strategy of the ranks.

    Returns:
        `GlobalBatches`, or the data set if the user has distributed it.

    Raises:
        StepError: ranks have different data.
    """
    shuffle = Shuffle()
    context.current().cell_state.order = shuffle.order
    with replaced(tf.random, "shuffle", shuffle):
        dataset = adapter.get_tf_dataset()
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return dataset
    if strategy.num_replicas_in_sync == 1:
        shuffle.order.seed = _proposed_order() if shuffle.is_used else 0
        return GlobalBatches(dataset, order=shuffle.next_pass)
    gather = gather_over(strategy)
    if context.current().request.options.own_data:
        return GlobalBatches(dataset, total_of=functools.partial(_total_of, gather))
    own = [_proposed_order(), _cardinality(dataset), *_sums_of_arrays(adapter)]
    gathered = gather(np.array(own, np.int32))
    shuffle.order.seed = int(gathered[0, 0]) if shuffle.is_used else 0
    _require_same("the data", gathered[:, 2:], ARGUMENTS)
    _require_same("the number of batches", gathered[:, 1:2])
    draws, dataset = _draws(dataset), _in_order(dataset)

    def check(first: Any) -> None:
        _check_first(first, gather, draws=draws)

    def check_sums(checksums: Checksums) -> None:
        gathered = gather(np.array(checksums, np.int32))
        if not Checksums.are_equal(gathered):
            _require_same("the first batch", gathered)

    pushdown, shuffle.order.sharding = find(dataset)
    selection = None
    if pushdown is not None:
        selection = Selection(pushdown, Place.of(strategy), check_sums)
        shuffle.order.sharding = ALL_ROWS  # until the model is known
    return GlobalBatches(dataset, order=shuffle.next_pass, check=check, selection=selection)


class Shuffle:
    """Replacement of `tf.random.shuffle` in Keras's data sets of arrays.

    With a seed of the user it is the original function, so the order is that of one device. Without
    one, each pass has a different order, derived from `order`.
    """

    def __init__(self) -> None:
        self.order = ShuffleOrder()
        self._upstream = tf.random.shuffle
        self._pass: tf.Variable | None = None

    def __call__(self, values: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        if is_seeded_by_user():
            return self._upstream(values, *args, **kwargs)
        if self._pass is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._pass = tf.Variable([0, 0], dtype=tf.int32, trainable=False)
        first = tf.cast(
            tf.reduce_min(values), tf.int32
        )  # for shuffle="batch", each batch has its own order
        return tf.random.experimental.stateless_shuffle(values, self._pass + tf.stack([first, 0]))

    @property
    def is_used(self) -> bool:
        """Return True if the data set is shuffled by this object."""
        return self._pass is not None

    def next_pass(self) -> None:
        if self._pass is not None:
            self._pass.assign([self.order.seed, self._pass[1] + 1])


def _proposed_order() -> int:
    """Return a seed for the shuffles of this `fit`. All ranks use rank 0's."""
    worker = context.current()
    state = worker.cell_state
    made = state.fits.fits if state.fits else 0
    return zlib.crc32(f"{worker.identity.seed}:{state.source}:{made}".encode()) >> 1


def _sums_of_arrays(adapter: Any) -> list[int]:
    """Return a checksum for each of `ARGUMENTS`. 0 for values that are not arrays."""
    sums = [0] * len(ARGUMENTS)
    if isinstance(adapter, ArrayDataAdapter):
        given = adapter._inputs if isinstance(adapter._inputs, tuple) else (adapter._inputs,)
        for number, part in enumerate(given):
            arrays = [array for array in tree.flatten(part) if array is not None]
            sums[number] = of_arrays(map(_sampled, arrays))
    return sums


def _sampled(array: Any) -> np.ndarray:
    rows = np.unique(np.linspace(0, array.shape[0] - 1, SAMPLED_ROWS).astype(np.int64))
    if isinstance(array, np.ndarray):
        return array[rows]
    return np.asarray(tf.gather(array, rows) if tf.is_tensor(array) else array)


def _checksum(value: Any) -> int:
    return of_arrays(tf.nest.flatten(value, expand_composites=True))


def _cardinality(dataset: tf.data.Dataset) -> int:
    """Return the number of batches of the data set. Negative if infinite or unknown."""
    return min(int(dataset.cardinality()), 0x7FFFFFFF)


def agreed(batch: Batch, strategy: tf.distribute.Strategy) -> Batch:
    """Check that a single batch is equal on all ranks, or mark it as a part with `--own-data`.

    Raises:
        StepError: ranks have different batches.
    """
    gather = gather_over(strategy)
    if context.current().request.options.own_data:
        return structs.replace(batch, total=_total_of(gather, batch.total), is_part=True)
    _require_same("the batch", gather(_sums_of_batch(batch.data)), ARGUMENTS)
    return batch


def _sums_of_batch(data: Any) -> np.ndarray:
    """Return a checksum for each of `ARGUMENTS`: shape (3,), int32. 0 for a missing argument."""
    parts = data if isinstance(data, tuple) else (data,)
    sums = np.zeros(len(ARGUMENTS), np.int32)
    sums[: len(parts)] = [_checksum(part) for part in parts]
    return sums


def _total_of(gather: Gather, rows: int) -> int:
    """Return the number of rows of a global batch from this rank's rows.

    Raises:
        StepError: ranks have different numbers of rows.
    """
    gathered = gather(np.array([rows], np.int32))[:, 0].tolist()
    if len(set(gathered)) > 1:
        raise StepError(
            f"--own-data: ranks have batches of {', '.join(map(str, gathered))} rows: give each "
            "rank the same number of samples, or batch them with drop_remainder=True"
        )
    return sum(gathered)


def _check_first(first: Any, gather: Gather, *, draws: bool) -> None:
    """Compare the first batch between ranks. With random augmentation, compare only the targets."""
    sums = gather(_sums_of_batch(first))
    skipped = 1 if draws and isinstance(first, tuple) and len(first) > 1 else 0
    _require_same("the first batch", sums[:, skipped:], ARGUMENTS[skipped:])


def _require_same(what: str, gathered: np.ndarray, names: Sequence[str] = ()) -> None:
    """Raise StepError if a column of `gathered` differs between ranks."""
    differing = [n for n, column in enumerate(gathered.T) if len(set(column.tolist())) > 1]
    if not differing:
        return
    named = ", ".join(dict.fromkeys(f"`{names[n]}`" for n in differing)) if names else ""
    raise StepError(
        f"{what}{' in ' if named else ''}{named} is not the same on all ranks: all workers need "
        "the same batches. Set a seed for generators and shuffle(...) "
        "(np.random.default_rng(0)), sort file names (sorted(os.listdir(folder))), or use "
        "--own-data if each rank has its own data on purpose"
    )


def _in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Make the order of elements deterministic, and so the same on all ranks."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _draws(dataset: tf.data.Dataset) -> bool:
    """Return True if a function of the data set draws random numbers, as augmentation does."""
    functions = [f.function for f in dataset._functions()]
    return any(_draws_in(f.graph) for f in functions) or any(
        _draws(below) for below in dataset._inputs()
    )


def _draws_in(graph: Any) -> bool:
    definition = graph.as_graph_def()
    inner = (node for function in definition.library.function for node in function.node_def)
    return any(node.op.startswith(_RANDOM) for node in (*definition.node, *inner))
