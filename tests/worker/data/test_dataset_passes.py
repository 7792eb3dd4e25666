"""The end of a pass through a data set does not wait for the deletion of its iterator."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from nbdist.worker.data.dataset_passes import one_pass
from nbdist.worker.data.map_pushdown import OwnRows

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60


class Elements:
    """Iterator over three numbers."""

    def __init__(self) -> None:
        self._left = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> Any:
        return next(self._left)


class Rows(Elements):
    """Iterator over elements of `OwnRows`."""

    def __next__(self) -> Any:
        return super().__next__(), ([2], [0], [0])


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


class Pushdown:
    """Double of a data set: TensorFlow in this process would fix its devices for later tests."""

    maps = ()
    checksums = None

    def __init__(self) -> None:
        self.deletions: list[Deletion] = []

    def dataset(self, division: object, constants: object) -> Pushdown:
        del division, constants
        return self

    def __iter__(self) -> Iterator[Any]:
        elements = Rows()
        self.deletions.append(Deletion(elements))
        return elements


def test_own_rows_leave_the_deletion_to_a_thread() -> None:
    pushdown = Pushdown()
    rows: Any = OwnRows(pushdown, lambda total: (total, total))  # type: ignore[arg-type]
    assert [part for part, *_ in rows] == [0, 1, 2]
    (deletion,) = pushdown.deletions
    assert deletion.wait() is not threading.current_thread()
