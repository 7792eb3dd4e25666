"""Passes through a `tf.data.Dataset` whose end does not wait for TensorFlow.

The deletion of an iterator often waits until the current period of tf.data's autotuning ends, which
grows with the length of the pass, to at most a minute (docs/facts.md). A run would wait for the
slowest of its ranks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


def one_pass(iterator: Iterator[T]) -> Iterator[T]:
    """Yield the elements of an iterator. At their end, a thread deletes it.

    An iterator that is not read to its end is deleted at once, because it may hold the lock of a
    `cache` in a file.

    Args:
        iterator: iterator of a data set, to which the caller keeps no reference.
    """
    held = [iterator]
    del iterator
    yield from held[0]
    threading.Thread(target=held.clear, name="nbdist-iterator", daemon=True).start()
