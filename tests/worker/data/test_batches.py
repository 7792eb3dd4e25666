"""Division of global batches into shards, and operations on trees of arrays."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.worker.data.batches import (
    RankRows,
    described,
    is_branch,
    kind_of,
    leaves,
    map_arrays,
    map_trees,
    rows_of,
    slicer,
)


@given(ranks=some.integers(1, 5), each=some.integers(1, 3), rows=some.integers(1, 40))
def test_shards_of_all_ranks_are_the_batch(ranks: int, each: int, rows: int) -> None:
    x = np.arange(rows)
    ranks_rows = [RankRows(rank=rank, ranks=ranks, replicas=ranks * each) for rank in range(ranks)]
    shares = [one.share(rows, lambda part: x[part]) for one in ranks_rows]
    assert {share.rows for share in shares} == {rows}
    assert {share.whole for share in shares} == {rows % (ranks * each) != 0}
    if shares[0].whole:
        assert all(share.values.tolist() == x.tolist() for share in shares)
    else:
        assert np.concatenate([share.values for share in shares]).tolist() == x.tolist()
        assert len({len(share.values) for share in shares}) == 1


def test_batch_that_divides_by_ranks_but_not_by_replicas_is_whole() -> None:
    share = RankRows(rank=1, ranks=2, replicas=4).share(6, lambda part: list(range(6))[part])
    assert (share.values, share.whole) == ([0, 1, 2, 3, 4, 5], True)


def test_batch_keeps_access_to_all_rows() -> None:
    x, y = np.arange(8).reshape(4, 2), np.arange(4)
    batch = RankRows(rank=1, ranks=2, replicas=2).batch(4, slicer(({"x": x, "y": y},)))
    (own,), (everything,) = batch.values, batch.everything()
    assert (batch.rows, batch.whole) == (4, False)
    assert own["x"].tolist() == [[4, 5], [6, 7]]
    assert own["y"].tolist() == [2, 3]
    assert everything["x"].tolist() == x.tolist()


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ((1, 2), True),
        ((), True),
        ({}, True),
        ([], False),
        ([1, 2], False),
        ([1.5], False),
        (["a"], False),
        ([[1], [2]], False),
        ([np.float32(1), np.float32(2)], False),
        ([np.ones(2)], True),
        ([(1, 2)], True),
        (np.ones(2), False),
    ],
)
def test_list_of_numbers_is_an_array(tree: Any, expected: bool) -> None:
    assert is_branch(tree) is expected


def test_map_pairs_leaves_by_key_and_place() -> None:
    trees = [{"a": (1, 2), "b": 3}, OrderedDict(b=30, a=(10, 20))]
    assert map_trees(sum, trees) == {"a": (11, 22), "b": 33}
    assert map_trees(len, [5, 6, 7]) == 3


def test_map_turns_lists_of_arrays_into_tuples() -> None:
    found = map_arrays(lambda array: array.sum(), {"a": [np.ones(2), np.ones(3)]})
    assert found == {"a": (2, 3)}


def test_leaves_are_in_order_of_depth_first() -> None:
    one, two, three = np.ones(1), np.ones(2), np.ones(3)
    found = leaves({"b": (one, [two]), "a": three})
    assert [leaf.size for leaf in found] == [1, 2, 3]
    assert leaves([1, 2]) == [[1, 2]]
    assert leaves(()) == []


def test_kind_depends_on_structure_shape_and_type() -> None:
    trees = [
        np.ones(2),
        np.ones(3),
        np.ones(2, "float32"),
        (np.ones(2),),
        {"a": np.ones(2)},
        {"b": np.ones(2)},
        (np.ones(2), np.ones(2)),
    ]
    assert len({kind_of(tree) for tree in trees}) == len(trees)
    assert kind_of({"a": [np.zeros(2)]}) == kind_of({"a": (np.ones(2),)})


def test_rows_are_taken_from_every_array() -> None:
    tree = (np.arange(4), {"a": np.arange(8).reshape(4, 2)})
    first, rest = rows_of(tree, np.array([3, 1]))
    assert first.tolist() == [3, 1]
    assert rest["a"].tolist() == [[6, 7], [2, 3]]


def test_shapes_are_described() -> None:
    assert described(({"x": np.ones((32, 64))}, np.ones(32))) == "(32, 64), (32,)"
