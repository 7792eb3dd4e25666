"""Folding of equal output of several ranks.

Ranks run the same cell, so most of their output is equal line by line, at slightly different times.
Each rank has a queue of items. Equal heads of the queues are shown together.
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
    """Item, and the ranks that wrote it."""

    ranks: tuple[int, ...]
    item: Item


class Folder(Generic[Item]):
    """Folder of items of several ranks. Keeps the order of each rank.

    Args:
        ranks: ranks that may write items.
        wait_s: maximum seconds that an item waits for the same item of other ranks.
    """

    def __init__(self, ranks: Iterable[int], wait_s: float) -> None:
        self._queues: dict[int, deque[tuple[float, Item]]] = {rank: deque() for rank in ranks}
        self._shown = dict.fromkeys(self._queues, 0)
        self._wait_s = wait_s

    def add(self, rank: int, item: Item) -> None:
        self._queues[rank].append((time.monotonic(), item))

    def take(self, *, everything: bool = False) -> Iterator[Folded[Item]]:
        """Yield the items that are ready, or all items with `everything`."""
        while heads := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            leader = self._leader({rank: item for rank, (_, item) in heads.items()})
            together = tuple(rank for rank, (_, item) in heads.items() if item == leader)
            complete = len(together) == len(self._queues)
            oldest = min(since for since, _ in heads.values())
            if not (complete or everything or time.monotonic() - oldest >= self._wait_s):
                return
            for rank in together:
                self._queues[rank].popleft()
                self._shown[rank] += 1
            yield Folded(together, leader)

    def _leader(self, heads: dict[int, Item]) -> Item:
        """Return the head to show next, preferably one that no other rank will still write.

        If only rank 0 writes A before all write B, A is first, so that B is shown once. Otherwise
        ranks take turns, so that items at the same position stay together.
        """
        turns = sorted(heads, key=lambda rank: (self._shown[rank], rank))
        for item in (heads[rank] for rank in turns):
            behind = (rank for rank, head in heads.items() if head != item)
            if not any(self._follows_later(rank, item) for rank in behind):
                return item
        return heads[turns[0]]

    def _follows_later(self, rank: int, item: Item) -> bool:
        queue = self._queues[rank]
        return any(queue[i][1] == item for i in range(1, min(len(queue), _LOOK_AHEAD)))
