"""The end of a pass through a data set does not wait for the deletion of its iterator."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.worker.data.batches import RankRows
from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.map_pushdown import OwnRows, find, rows_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60


class Elements:
    """Iterator over three numbers."""

    def __init__(self) -> None:
        self._left = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._left)


class Deletion:
    """Thread that deletes an object."""

    def __init__(self, watched: Any) -> None:
        self.thread: threading.Thread | None = None
        self._done = threading.Event()
        weakref.finalize(watched, self._note)

    def _note(self) -> None:
        self.thread = threading.current_thread()
        self._done.set()

    def wait(self) -> threading.Thread | None:
        assert self._done.wait(WAIT_S)
        return self.thread


def test_a_thread_deletes_the_iterator_at_the_end() -> None:
    elements = Elements()
    deletion = Deletion(elements)
    passing = one_pass(elements)
    del elements
    assert list(passing) == [0, 1, 2]
    assert deletion.wait() is not threading.current_thread()


def test_an_unfinished_pass_deletes_its_iterator_at_once() -> None:
    elements = Elements()
    deletion = Deletion(elements)
    passing = one_pass(elements)
    del elements
    assert next(passing) == 0
    del passing
    assert deletion.thread is threading.current_thread()


@pytest.mark.parametrize("kind", ["own rows", "all rows"])
def test_sources_of_tf_data_leave_the_deletion_to_a_thread(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops

    deletions: list[Deletion] = []
    create = iterator_ops.OwnedIterator.__init__

    def watched(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        deletions.append(Deletion(self))

    monkeypatch.setattr(iterator_ops.OwnedIterator, "__init__", watched)
    dataset = tf.data.Dataset.range(8).map(lambda x: 2 * x).batch(4)
    if kind == "own rows":
        pushdown, _ = find(dataset)
        assert pushdown is not None
        ranks = RankRows(rank=1, ranks=2, replicas=2)
        rows = [part.numpy().tolist() for part, *_ in OwnRows(pushdown, rows_of_rank(ranks))]
        assert rows == [[4, 6], [12, 14]]
    else:
        from nbdist.records import StepOptions
        from nbdist.worker.data.sources import open_source

        source = open_source(dataset, StepOptions(data="dataset"), rank=0, ranks=1, gather=None)
        batches = list(source.epoch(1, RankRows(rank=0, ranks=1, replicas=1)))
        assert len(batches) == 2
    gc.collect()
    assert len(deletions) == 1
    assert deletions[0].wait() is not threading.current_thread()
