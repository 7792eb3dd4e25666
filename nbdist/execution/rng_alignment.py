"""Alignment of the random generators of all ranks before each cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nbdist.records import CellEnded


class Alignment:
    """The last reported states of the ranks' generators."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[str, int]] = {}
        self._state = b""

    def forget(self) -> None:
        """Drop all states, after the ranks were seeded again."""
        self._digests, self._state = {}, b""

    def note(self, ended: Mapping[int, CellEnded]) -> None:
        """Store the states of the generators of the ranks that ran a cell."""
        for rank, end in ended.items():
            if end.generators:
                self._digests[rank] = end.generators
                self._state = end.generator_states or self._state

    def due(self, ranks: Collection[int], world_size: int) -> tuple[bytes, str]:
        """Return the states that the ranks of a cell must restore first, and a message.

        Args:
            ranks: the ranks of the cell.
            world_size: the number of ranks of the cluster.

        Returns:
            Rank 0's states, packed, and the message; both empty if all ranks have equal states or
            the cell does not run on all ranks.
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
            f"rank {formatting.ranks(odd)} drew other random numbers than rank 0 "
            f"({', '.join(names)}). All ranks continue from rank 0's generators. For different "
            "numbers on each rank, use a generator per rank: np.random.default_rng(rank)"
        )
