"""Random generators that ranks have drawn from differently continue alike in the next cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import labels

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nbdist.records import CellEnded


class Alignment:
    """What the ranks last said of their generators."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[str, int]] = {}
        self._state = b""

    def forget(self) -> None:
        """The ranks have been seeded anew."""
        self._digests, self._state = {}, b""

    def note(self, ended: Mapping[int, CellEnded]) -> None:
        """Take in how a cell has left the generators of the ranks that ran it."""
        for rank, end in ended.items():
            if end.generators:
                self._digests[rank] = end.generators
                self._state = end.generator_states or self._state

    def due(self, ranks: Collection[int], world_size: int) -> tuple[bytes, str]:
        """What a cell's ranks have to take over first, and a line that says so.

        Args:
            ranks: of the cell.
            world_size: of the cluster.

        Returns:
            Rank 0's states; nothing if all ranks are alike, or the cell is not for all.
        """
        if len(ranks) < world_size or not self._state or 0 not in self._digests:
            return b"", ""
        chief = self._digests[0]
        odd = sorted(rank for rank, own in self._digests.items() if own != chief)
        if not odd:
            return b"", ""
        names = sorted(
            {n for r in odd for n in chief if self._digests[r].get(n, chief[n]) != chief[n]}
        )
        if not names:
            return b"", ""
        return self._state, (
            f"rank {labels.ranks(odd)} had drawn other random numbers than rank 0 "
            f"({', '.join(names)}): all continue from rank 0's. For numbers of a rank's own, use a "
            "generator of its own, as np.random.default_rng(rank)"
        )
