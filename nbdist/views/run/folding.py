"""What several ranks say alike is shown once.

Ranks run the same cell, so most of what they print is the same, line by line, at slightly
different times. Each rank's items wait in a queue of its own; the heads of the queues are
compared, and equal ones leave together.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Item = TypeVar("Item")

_LOOK_AHEAD = 20


class Folded(msgspec.Struct, Generic[Item], frozen=True):
    """An item and the ranks that said it."""

    ranks: tuple[int, ...]
    item: Item


class Folder(Generic[Item]):
    """Folds the items of several ranks; each rank's own order is kept.

    Args:
        ranks: the ranks that may say something.
        wait_s: how long an item waits for the same item of ranks that are still silent.
    """

    def __init__(self, ranks: Iterable[int], wait_s: float) -> None:
        self._queues: dict[int, deque[tuple[float, Item]]] = {rank: deque() for rank in ranks}
        self._shown = dict.fromkeys(self._queues, 0)
        self._wait_s = wait_s

    def add(self, rank: int, item: Item) -> None:
        self._queues[rank].append((time.monotonic(), item))

    def take(self, *, everything: bool = False) -> Iterator[Folded[Item]]:
        """What can be shown now; with `everything`, nothing is kept back."""
        while heads := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            complete = len(heads) == len(self._queues)
            oldest = min(said for said, _ in heads.values())
            if not (complete or everything or time.monotonic() - oldest >= self._wait_s):
                return
            leader = self._leader({rank: item for rank, (_, item) in heads.items()})
            together = tuple(rank for rank, (_, item) in heads.items() if item == leader)
            for rank in together:
                self._queues[rank].popleft()
                self._shown[rank] += 1
            yield Folded(together, leader)

    def _leader(self, heads: dict[int, Item]) -> Item:
        """The head to show next: one that no other rank is still going to say, if there is one.

        When rank 0 alone says A before all say B, A goes first, so that B stays whole. Else the
        ranks take turns, so that what they say at the same place stays together.
        """
        turns = sorted(heads, key=lambda rank: (self._shown[rank], rank))
        for item in (heads[rank] for rank in turns):
            behind = (rank for rank, head in heads.items() if head != item)
            if not any(self._says_later(rank, item) for rank in behind):
                return item
        return heads[turns[0]]

    def _says_later(self, rank: int, item: Item) -> bool:
        queue = self._queues[rank]
        return any(queue[i][1] == item for i in range(1, min(len(queue), _LOOK_AHEAD)))
