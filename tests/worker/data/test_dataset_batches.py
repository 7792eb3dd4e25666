"""Batches of data sets of TensorFlow in training loops. A process of its own imports TensorFlow."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from nbdist.worker.data.dataset_batches import NumpyBatches, numpy_batches
from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = '''
import collections, logging
import numpy as np, tensorflow as tf
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.batch_array import whole
from nbdist.worker.data.dataset_batches import numpy_batches
from nbdist.worker.data.loop_batches import LoopBatches

ROWS = 22
x, y = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32), np.arange(ROWS)
slices = tf.data.Dataset.from_tensor_slices
strength = tf.Variable(2.0)
Pair = collections.namedtuple("Pair", "x y")

def both():
    return slices((x, y))

def changed(x, y):
    return tf.nn.softmax(tf.sin(x) * 3.3), y * 2

MAPPED = {
    "map": lambda: both().map(changed).batch(4),
    "shuffle": lambda: both().map(changed).shuffle(9, 1).repeat(2).batch(4).prefetch(1),
    "dict": lambda: slices(y).map(lambda n: {"a": (n, n > 3), "b": tf.one_hot(n, 3)}).batch(4),
    "one array": lambda: slices(x).map(lambda x: x + 1).batch(4, drop_remainder=True),
    "padded": lambda: slices(y).map(lambda n: tf.range(n % 5)).padded_batch(
        4, padded_shapes=[6], padding_values=np.int64(-1)),
}
OTHERS = {
    "no map": lambda: both().batch(4),
    "cache of batches": lambda: both().map(changed).batch(4).cache(),
    "texts": lambda: slices(y).map(tf.strings.as_string).batch(4),
    "sparse": lambda: slices(y).map(lambda n: tf.sparse.from_dense(tf.one_hot(n, 3))).batch(4),
    "named tuples": lambda: both().map(Pair).batch(4),
    "unknown shapes": lambda: slices(y).map(lambda n: tf.range(n - n + 2)).batch(4),
    "variable": lambda: slices(x).map(lambda x: x * strength).batch(4),
    "samples": lambda: both().map(changed),
}

def flat(element):
    return tf.nest.flatten(element)

def passes(make, rank, ranks, of_numpy):
    loop, dataset = LoopBatches("", RankRows(rank, ranks, ranks), ("x",)), make()
    for _ in range(2):
        yield loop.of(numpy_batches(dataset) if of_numpy else dataset, {})

def compare(make, ranks, of_numpy):
    """Compare two passes of each rank with those of one process."""
    one, kinds = make(), set()
    expected = [list(one.as_numpy_iterator() if of_numpy else one) for _ in range(2)]
    for rank in range(ranks):
        for found, elements in zip(passes(make, rank, ranks, of_numpy), expected, strict=True):
            for batch, element in zip(found, elements, strict=True):
                tf.nest.assert_same_structure(batch, element)
                for array, leaf in zip(flat(batch), flat(element), strict=True):
                    assert array.shape == leaf.shape and type(array.shape) is type(leaf.shape)
                    assert array.dtype == leaf.dtype and array.ndim == leaf.ndim
                    rows, whole_rows = np.asarray(leaf), array.whole()
                    each = len(rows) // ranks
                    own = slice(rank * each, (rank + 1) * each)
                    if len(rows) % ranks:
                        own = slice(None)
                    np.testing.assert_array_equal(np.asarray(array._own), rows[own])
                    np.testing.assert_array_equal(np.asarray(whole_rows), rows)
                    kinds.add(type(whole_rows) is type(leaf))
                    if of_numpy:
                        assert whole_rows.flags.writeable == leaf.flags.writeable
    return kinds == {True}

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("tensorflow").addHandler(handler)
outcome = {
    name: all(compare(make, ranks, n) for ranks in (2, 4) for n in (False, True))
    for name, make in MAPPED.items()
}
for name, make in OTHERS.items():
    dataset, loop = make(), LoopBatches("", RankRows(0, 2, 2), ("x",))
    iterator = numpy_batches(dataset)
    outcome[name] = loop.of(dataset, {}) is dataset and loop.of(iterator, {}) is iterator
    assert iter(iterator) is not iter(iterator)
for _ in range(6):
    (first, _), *_ = next(passes(MAPPED["map"], 0, 2, True))
    first.whole()
outcome["warnings"] = [text for text in warnings if "retracing" in text]
'''

NAMES = re.findall(r'\n    "([^"]+)": lambda: ', PROGRAM)


@cache
def outcome() -> dict[str, Any]:
    found: dict[str, Any] = plainly({"only": PROGRAM}, "tensorflow", "keras")["only"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_those_of_one_process_or_each_rank_reads_all(name: str) -> None:
    """The program has compared the rows of each rank, or received the data set itself."""
    assert outcome()[name] is True


def test_loops_compile_functions_without_warnings() -> None:
    """Each loop has a function of its own, and TensorFlow warns of frequent compilation."""
    assert outcome()["warnings"] == []


def test_other_objects_make_their_own_iterators() -> None:
    class Other:
        def as_numpy_iterator(self) -> list[int]:
            return [1]

    assert not isinstance(numpy_batches(Other()), NumpyBatches)
    assert numpy_batches(Other()) == [1]
