"""What became of the other ranks when one has failed, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import AnotherRankError, LoneCollectiveError, UnsentError
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nbdist.records import CellEnded


def others(first: CellEnded, ended: Mapping[int, CellEnded], stuck: Collection[int]) -> list[str]:
    """One line for each kind of end.

    Args:
        first: the failure that is shown.
        ended: all ends, by rank.
        stuck: ranks that have not ended.
    """
    kinds: dict[str, list[int]] = {}
    for rank, end in ended.items():
        if rank != first.rank:
            kinds.setdefault(_words(end, first), []).append(rank)
    if stuck:
        kinds["still running, perhaps in a collective: type %dist_restart"] = list(stuck)
    return [f"rank {formatting.ranks(ranks)}: {kind}" for kind, ranks in kinds.items()]


def follows(ended: CellEnded) -> bool:
    """Whether it failed because another rank had."""
    return ended.failure is not None and ended.failure.follows


def _words(ended: CellEnded, first: CellEnded) -> str:
    if ended.failure is None or ended.status == "interrupted":
        return "stopped" if ended.status == "interrupted" else "finished"
    assert first.failure is not None
    if ended.failure.ename == AnotherRankError.__name__:
        return "stopped with it"
    if ended.failure.ename == UnsentError.__name__:
        return ended.failure.evalue
    if ended.failure.follows and first.failure.ename == LoneCollectiveError.__name__:
        return "waited in a collective, too, which was broken off"
    if ended.failure.follows:
        return "waited for it in a collective, which was broken off"
    if ended.failure.same == first.failure.same:
        return "the same error"
    return f"{ended.failure.ename}: {ended.failure.evalue}"
