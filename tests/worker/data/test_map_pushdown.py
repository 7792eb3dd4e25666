"""Samples of a rank that are selected below the maps. A process of its own imports TensorFlow."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from nbdist.worker.data.batches import Checksums
from tests.references import plainly

pytestmark = pytest.mark.processes

PROGRAM = '''
import os, tempfile
import numpy as np, tensorflow as tf
from nbdist.worker.data.batches import RankRows
from nbdist.worker.data import reshuffle
from nbdist.worker.data.map_pushdown import OwnRows, find, rows_of_rank

reshuffle.MOST_BYTES = 1 << 20
tf.random.set_seed(1)
ROWS = 28
x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
y = np.arange(ROWS)
calls = []
folder = tempfile.mkdtemp()
paths = []
for n in range(3):
    paths.append(os.path.join(folder, f"{n}.tfrecord"))
    with tf.io.TFRecordWriter(paths[-1]) as writer:
        for i in range(5 + n):
            writer.write(np.float32([0, 1, 2, n * 10 + i]).tobytes())
text = os.path.join(folder, "lines.txt")
with open(text, "w") as lines:
    lines.write("\\n".join(f"{n},{n * n}" for n in range(11)))

def counted(values, stateful=False):
    """Count a call. TensorFlow knows of no effect."""
    def call(array):
        calls.append(1)
        return array
    counted_values = tf.numpy_function(call, [values], values.dtype, stateful=stateful)
    counted_values.set_shape(values.shape)
    return counted_values

def changed(x, y):
    return tf.nn.softmax(tf.sin(counted(x)) * 3.3), y * 2

def drawn(x, y):
    return counted(x) + tf.random.uniform([5]), y

def with_effect(x, y):
    return counted(x, stateful=True), y

def drawn_by_number(n, xy):
    return tf.image.stateless_random_flip_up_down(counted(xy[0])[:, None, None], (n, 1)), xy[1]

data, slices = tf.data.Dataset, tf.data.Dataset.from_tensor_slices
table = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(ROWS, dtype=tf.int64), tf.range(ROWS) * 7), -1)
counter = tf.Variable(0, dtype=tf.int64)

def counting(n):
    counter.assign_add(1)
    return n

def both():
    return slices((x, y))

def words(n):
    return tf.strings.as_string(counted(n))

CHAINS = {
    "map": lambda: both().map(changed).batch(12),
    "parallel map, even": lambda: both().map(changed, tf.data.AUTOTUNE).batch(
        12, drop_remainder=True).prefetch(2),
    "parallel batch": lambda: both().map(changed, 2, deterministic=True).batch(
        12, num_parallel_calls=2),
    "one array": lambda: slices(x).map(lambda x: counted(x) + 1).batch(12),
    "dict": lambda: slices({"x": x, "y": y}).map(
        lambda d: {"z": counted(d["x"]) * 2, "y": d["y"]}).batch(12),
    "nested": lambda: slices((x, {"a": (y, x)})).map(
        lambda x, d: {"a": (counted(x), d["a"][0]), "b": (d["a"][1],)}).batch(12),
    "text": lambda: slices(y).map(words).batch(12),
    "sparse": lambda: slices(y).map(
        lambda n: (tf.sparse.from_dense(tf.one_hot(counted(n), ROWS)), n)).batch(12),
    "two maps": lambda: both().map(changed).prefetch(3).map(
        lambda x, y: (x[::-1], y + 1)).batch(12),
    "shuffle": lambda: both().shuffle(10, seed=2).map(changed).batch(12),
    "shuffle by global seed": lambda: both().shuffle(10).map(changed).batch(12),
    "shuffle once": lambda: both().shuffle(10, 3, reshuffle_each_iteration=False)
        .map(changed).batch(12),
    "shuffle and repeat": lambda: both().shuffle(10, 3).repeat(2).map(changed).batch(12),
    "positions": lambda: both().map(changed).skip(2).take(15).repeat(2).batch(12),
    "positions of batches": lambda: both().map(changed).batch(12).skip(1).repeat(2).take(7),
    "whole batches repeated": lambda: both().map(changed).batch(9).repeat(2),
    "options": lambda: both().map(changed).with_options(tf.data.Options()).batch(12)
        .with_options(tf.data.Options()),
    "cache below": lambda: both().cache().map(changed).batch(12),
    "cache of batches": lambda: both().map(changed).batch(12).cache().prefetch(-1),
    "padded": lambda: slices(y).map(lambda n: tf.range(counted(n) % 5)).padded_batch(
        12, padded_shapes=[6], padding_values=np.int64(-1)),
    "filter below": lambda: both().filter(lambda x, y: y % 3 > 0).map(changed).batch(12),
    "flat_map below": lambda: slices(y).flat_map(
        lambda n: data.range(n % 3)).map(lambda n: counted(n) + 1).batch(12),
    "zip": lambda: data.zip((slices(x), slices(y))).map(changed).batch(12),
    "enumerate": lambda: both().enumerate().map(drawn_by_number).batch(12),
    "concatenate": lambda: both().concatenate(both()).map(changed).batch(12),
    "shard": lambda: both().shard(2, 1).map(changed).batch(12),
    "generator": lambda: data.from_generator(
        lambda: zip(x, y), output_signature=(tf.TensorSpec([5]), tf.TensorSpec([], tf.int64))
    ).map(changed).batch(12),
    "unequal shapes below": lambda: data.from_generator(
        lambda: (np.ones(n % 4, np.float32) for n in y), output_signature=tf.TensorSpec([None])
    ).map(lambda v: tf.reduce_sum(counted(v))).batch(12),
    "records": lambda: tf.data.TFRecordDataset(paths).map(
        lambda r: tf.io.decode_raw(counted(r), tf.float32)).batch(12),
    "interleaved files": lambda: data.list_files(folder + "/*.tfrecord", shuffle=False).interleave(
        tf.data.TFRecordDataset, cycle_length=2).shuffle(7, seed=1).map(
        lambda r: tf.io.decode_raw(counted(r), tf.float32), 2).batch(12),
    "lines": lambda: tf.data.TextLineDataset(text).map(
        lambda line: tf.strings.to_number(tf.strings.split(counted(line), ","))).batch(12),
    "table": lambda: slices(y).map(lambda n: table.lookup(counted(n))).batch(12),
    "map over batches": lambda: both().map(changed).batch(12).map(lambda x, y: (x - x[0], y)),
    "shuffle above": lambda: both().map(changed).shuffle(10, seed=1).batch(12),
    "shuffle above once": lambda: both().map(changed).shuffle(
        10, 3, reshuffle_each_iteration=False).repeat(2).batch(12),
    "shuffle above by global seed": lambda: both().map(changed).shuffle(40).batch(12),
    "shuffle above and repeat": lambda: both().map(changed).shuffle(10, 3).repeat(2).batch(12),
    "shuffle between maps": lambda: both().repeat(2).map(lambda x, y: (x + 1, y)).prefetch(1)
        .shuffle(10, 3).take(41).map(changed).shuffle(5, 4).batch(12),
    "shuffled generator": lambda: data.from_generator(
        lambda: zip(x, y), output_signature=(tf.TensorSpec([5]), tf.TensorSpec([], tf.int64))
    ).map(changed).shuffle(10, 4).batch(12),
    "shuffled records": lambda: data.from_tensor_slices(paths).shuffle(3, 5).interleave(
        tf.data.TFRecordDataset, cycle_length=2).map(
        lambda r: tf.io.decode_raw(counted(r), tf.float32), 2).shuffle(7, seed=1).batch(12),
    "a variable below a shuffle": lambda: slices(y).map(
        lambda n: counted(n) + counter).shuffle(10, 3).batch(12),
    "large arrays below a shuffle": lambda: data.zip((both(), data.from_tensors(
        tf.zeros(1 << 18, tf.float64)).repeat())).map(lambda x, _: x).shuffle(10, 3).batch(12),
    "cache above": lambda: both().map(changed).cache().batch(12),
    "cache in a file": lambda: both().map(changed).batch(12).cache(tempfile.mktemp()),
    "random map": lambda: both().map(drawn).batch(12),
    "effect": lambda: both().map(with_effect).batch(12),
    "order of a parallel map": lambda: both().map(changed, 2, deterministic=False).batch(12),
    "padding by batch": lambda: slices(y).map(lambda n: tf.range(counted(n) % 5)).padded_batch(12),
    "filter above": lambda: both().map(changed).filter(lambda x, y: y % 3 > 0).batch(12),
    "no map": lambda: both().batch(12),
    "no batch": lambda: both().map(changed),
    "a counter that a map below changes": lambda: slices(y).map(counting).map(
        lambda n: counted(n) + counter).batch(12),
}

def flat(element):
    return [np.asarray(leaf) for leaf in tf.nest.flatten(element, expand_composites=False)
            if not isinstance(leaf, tf.SparseTensor)] + [
        np.asarray(tf.sparse.to_dense(leaf)) for leaf in tf.nest.flatten(element)
        if isinstance(leaf, tf.SparseTensor)]

def same(selected, expected, rank_rows):
    """Compare a pass through this rank's rows with its rows of the global batches."""
    checksums = []
    for (own, total, sums), whole in zip(selected, expected, strict=True):
        whole = flat(whole)
        share = rank_rows.share(len(whole[0]), lambda part: [leaf[part] for leaf in whole])
        assert total == share.rows
        for mine, one in zip(flat(own), share.values, strict=True):
            assert mine.dtype == one.dtype and mine.shape == one.shape
            assert mine.tobytes() == one.tobytes() or mine.tolist() == one.tolist()
        checksums.append(sums)
    return checksums

ALL_RANKS = ("map", "shuffle", "padded", "positions of batches", "whole batches repeated")

def ranks_of_chain(name):
    """Return the ranks to compare, by the number of ranks."""
    if not MANY:
        return {"map": {2: [0, 1], 3: [2]}, "shuffle": {2: [1]}}.get(name, {3: [2]})
    return {1: [0], 2: [0, 1], 3: [2], 4: [0, 3]} if name in ALL_RANKS else {2: [1], 3: [2]}

def of_chain(name, make):
    pushdown, why = find(make())
    if pushdown is None:
        return {"why": why}
    result = {"why": why, "calls": {}, "sums": {}}
    for ranks, chosen in ranks_of_chain(name).items():
        result["calls"][ranks], sums = [], []
        for rank in chosen:
            rank_rows = RankRows(rank, ranks, ranks)
            tf.random.set_seed(1)
            mine = make()
            tf.random.set_seed(1)
            one = make()
            list(mine), list(one)  # an earlier pass, which counts for shuffles
            selected = OwnRows(find(mine)[0], rows_of_rank(rank_rows))
            for _ in range(2):
                expected = list(one)
                calls.clear()
                own = list(selected)
                result["calls"][ranks].append(len(calls))
                sums.append(same(own, expected, rank_rows))
            for mine_now, one_now in zip(mine, one, strict=True):  # a later pass
                for left, right in zip(flat(mine_now), flat(one_now), strict=True):
                    assert left.tobytes() == right.tobytes() or left.tolist() == right.tolist()
        result["sums"][ranks] = sums
    return result

outcome = {name: of_chain(name, CHAINS[name]) for name in CHOSEN}
several = RankRows(1, 2, 4)  # two replicas on each rank
of_several = OwnRows(find(CHAINS["map"]())[0], rows_of_rank(several))
same(list(of_several), list(CHAINS["map"]()), several)

def first_sums(dataset):
    return next(iter(OwnRows(find(dataset)[0], rows_of_rank(several))))[2]

outcome["other data"] = first_sums(slices((x[::-1], y)).map(changed).batch(12))
outcome["other maps"] = [
    first_sums(slices((x, y)).map(lambda x, y: (x + rank, y)).batch(12)) for rank in range(2)]

def read_below(prefix):
    names = slices([f"{prefix}{n}" for n in range(ROWS)])
    return names.map(lambda name: tf.strings.regex_replace(name, "^.*/", "")).batch(12)

outcome["other texts below"] = [first_sums(read_below(prefix)) for prefix in ("a/", "b/")]
'''

BATCH = 12
COMPARED = 4
"""Samples of the first batch of a pass that each rank maps to compare them."""

ELEMENTS = {
    "parallel map, even": 24,
    "shuffle and repeat": 56,
    "shuffle above once": 56,
    "shuffle above and repeat": 56,
    "shuffle between maps": 41,
    "shuffled records": 18,
    "positions": 30,
    "positions of batches": 56,
    "filter below": 18,
    "flat_map below": 27,
    "concatenate": 56,
    "shard": 14,
    "records": 18,
    "interleaved files": 18,
    "lines": 11,
}
"""Samples in a pass through the chains that do not have 28."""

STAYS = {
    "map over batches": "by element",
    "a variable below a shuffle": "while samples are shuffled (ReadVariableOp)",
    "large arrays below a shuffle": "by element",
    "cache above": "by element",
    "cache in a file": "because cache() has a file",
    "random map": "because a map function has a state or an effect (RandomUniform)",
    "effect": "because a map function has a state or an effect (PyFunc)",
    "order of a parallel map": "may change the order of the samples (deterministic=False)",
    "padding by batch": "by element",
    "filter above": "by element",
    "no map": "by element",
    "no batch": "by element",
    "a counter that a map below changes": "that an operation below it may change (ReadVariableOp)",
}
OTHER_BATCHES = {"whole batches repeated", "positions of batches"}
"""Chains that repeat batches, or whose batches have another size."""

NAMES = re.findall(r'\n    "([^"]+)": lambda: ', PROGRAM)
MOVED = [name for name in NAMES if name not in STAYS]
REPEATED = {
    *("cache below", "concatenate", "lines", "nested", "one array", "options", "parallel batch"),
    *("shard", "shuffle once", "sparse", "table", "text", "two maps"),
}
"""Chains whose parts are also those of other chains."""


@cache
def outcome(*, many: bool = False) -> dict[str, Any]:
    """Return the outcomes of all chains for many ranks, or of the chains not in `REPEATED`."""
    chosen = NAMES if many else [name for name in NAMES if name not in REPEATED]
    program = f"CHOSEN, MANY = {chosen!r}, {many}\n{PROGRAM}"
    found: dict[str, Any] = plainly({"chains": program}, "tensorflow", "keras")["chains"]
    return found


def are_equal(first: list[int], second: list[int]) -> bool:
    return Checksums.are_equal(np.array([first, second]))


def calls(samples: int, ranks: int) -> int:
    """Return the samples of a rank: a part of a batch that divides evenly, or all of it."""
    sizes = [min(BATCH, samples - first) for first in range(0, samples, BATCH)]
    own = sum(size // ranks if size % ranks == 0 else size for size in sizes)
    return own + COMPARED


@pytest.mark.parametrize(
    ("name", "many"),
    [
        *((name, False) for name in MOVED if name not in REPEATED),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in MOVED),
    ],
)
def test_a_rank_maps_its_own_samples_and_all_ranks_read_the_same_data(
    name: str, *, many: bool
) -> None:
    """The program has compared the elements of each rank with its rows of the batches."""
    found = outcome(many=many)[name]
    assert found["why"] == "by element: each worker maps its own samples only"
    for ranks, counted in ((int(n), counts) for n, counts in found["calls"].items()):
        checksums = found["sums"][str(ranks)]
        assert all(checksums[n] == checksums[n % 2] for n in range(len(checksums)))
        if name not in OTHER_BATCHES:
            samples = ELEMENTS.get(name, 28)
            second = 0 if name == "cache of batches" else calls(samples, ranks)
            assert set(counted[1::2]) == {second}, ranks
            assert set(counted[::2]) == {calls(samples, ranks)}, ranks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("positions of batches", {3: 24}),
        ("whole batches repeated", {3: 20}),
        pytest.param("positions of batches", {1: 56, 2: 28, 3: 24, 4: 14}, marks=pytest.mark.full),
        pytest.param(
            "whole batches repeated", {1: 56, 2: 56, 3: 20, 4: 56}, marks=pytest.mark.full
        ),
    ],
)
def test_batches_are_repeated_with_their_rows(name: str, expected: dict[int, int]) -> None:
    counted = outcome(many=len(expected) > 1)[name]["calls"]
    passes = 2 * COMPARED  # the batches are made twice
    assert {ranks: min(counted[str(ranks)]) - passes for ranks in expected} == expected


@pytest.mark.parametrize("name", STAYS)
def test_maps_whose_result_may_change_run_for_all_samples(name: str) -> None:
    found = outcome()[name]
    assert found["why"].startswith("by element")
    assert found["why"].endswith(STAYS[name])
    assert "calls" not in found


def test_shuffles_count_earlier_passes() -> None:
    first, second = outcome()["shuffle"]["sums"]["2"][:2]
    assert first != second


def test_other_data_have_another_checksum() -> None:
    first, *others = outcome()["map"]["sums"]["2"][0]
    assert not are_equal(outcome()["other data"], first)
    assert {tuple(each) for each in others} == {tuple(others[0])} != {tuple(first)}


def test_maps_that_differ_between_ranks_have_other_checksums() -> None:
    first, second = outcome()["other maps"]
    assert not are_equal(first, second)


def test_texts_that_differ_below_the_maps_may_be_equal_above() -> None:
    first, second = outcome()["other texts below"]
    assert first[0] != second[0]
    assert are_equal(first, second)


def test_operations_of_another_version_stay_as_they_are() -> None:
    program = """
import tensorflow as tf
from tensorflow.python.data.ops import map_op
from nbdist.worker.data.map_pushdown import find
dataset = tf.data.Dataset.range(8).map(lambda n: n).batch(4)
del map_op._MapDataset
outcome = find(dataset)
"""
    found, why = plainly({"only": program}, "tensorflow", "keras")["only"]
    assert found is None
    assert why.startswith("by element: each worker maps all samples, because TensorFlow ")
    assert "has no tensorflow.python.data.ops.map_op._MapDataset, which nbdist needs" in why
