"""Rows of the batches of a `fit`, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.records import Rows

MOST_BYTES = 1 << 22
"""Maximum bytes of the rows. A picture shows fewer steps than fit."""


class Batches:
    """Rows of the batches of a `fit`.

    If there are too many, only every second of their steps stays, the same on all ranks.
    """

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._last: dict[int, Rows] = {}
        self._stride = 1
        self._bytes = 0

    def add(self, rows: Rows) -> None:
        """Add rows of one rank. There must be at least one."""
        self._last[rows.rank] = rows
        self._keep(rows)
        while self._bytes > MOST_BYTES:
            self._stride *= 2
            before, self._rows, self._bytes = self._rows, [], 0
            for one in before:
                self._keep(one)

    def _keep(self, rows: Rows) -> None:
        chosen = rows.every(self._stride)
        if chosen.values:
            self._rows.append(chosen)
            self._bytes += len(chosen.values)

    def all(self) -> tuple[Rows, ...]:
        """Return the rows. The last ones of each rank are always among them."""
        return (*self._rows, *self._last.values())
