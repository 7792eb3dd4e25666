"""Rows of a batch on each replica, and their weight."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("strategy")  # before TensorFlow starts its devices


@pytest.mark.parametrize("is_known", [True, False])
def test_shares_of_an_uneven_batch(is_known: bool) -> None:
    """The number of rows may be known at run time only."""
    import tensorflow as tf

    from nbdist.worker.tensorflow.replica.batch_share import Shares

    shares = Shares(11 if is_known else tf.constant(11), 4, even=False)
    parts = [shares.of(replica) for replica in range(4)]
    rows = [(int(part.offset), int(part.rows)) for part in parts]
    assert rows == [(0, 3), (3, 3), (6, 3), (9, 2)]
    expected = [3 / 11] * 3 + [2 / 11]
    assert [float(part.part(tf.float32)) for part in parts] == pytest.approx(expected)
    expected = [12 / 11] * 3 + [8 / 11]
    assert [float(part.weight(tf.float32)) for part in parts] == pytest.approx(expected)
    both = shares.of(2, count=2)
    assert (int(both.offset), int(both.rows)) == (6, 5)


def test_each_replica_has_all_rows_of_a_whole_batch() -> None:
    import tensorflow as tf

    from nbdist.worker.tensorflow.replica.batch_share import Shares

    whole = Shares(11, 4, whole=True).of(3)
    assert (whole.offset, whole.rows, whole.weight(tf.float32)) == (0, 11, None)
    assert float(whole.part(tf.float32)) == 0.25
    assert float(whole.summed(tf.constant(7.0))) == 7


def test_parts_of_a_large_batch_in_float16() -> None:
    """The numbers of rows are too large for float16, their ratio is not."""
    import tensorflow as tf

    from nbdist.worker.tensorflow.replica.batch_share import Shares

    parts = [Shares(140_001, 2, even=False).of(replica) for replica in (0, 1)]
    assert [float(part.part(tf.float16)) for part in parts] == [0.5, 0.5]
    assert [float(part.weight(tf.float16)) for part in parts] == [1, 1]
    assert [float(part.summed(tf.constant(3, tf.float16))) for part in parts] == [6, 6]


def test_parts_that_the_user_distributed_are_counted(strategy: Any) -> None:
    import tensorflow as tf

    from nbdist.worker.tensorflow.replica.batch_share import CountedShares, replica_id

    shares = CountedShares(2)

    @tf.function(autograph=False)
    def every() -> Any:
        def replica() -> Any:
            shares.count(tf.constant([3, 4])[replica_id()])
            share = shares.here()
            return share.total, share.rows, share.offset

        return strategy.run(replica)

    local = strategy.experimental_local_results
    found = [[int(part) for part in local(value)] for value in every()]
    assert found == [[7, 7], [3, 4], [0, 3]]
