"""Where ranks are that make no step, in a sentence and with their stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import Where


def hang(where: Mapping[int, Where], host_of: Mapping[int, str]) -> str:
    """Who is waited for, who waits, and who does not answer.

    Args:
        where: of each rank that has said it.
        host_of: of each rank that still runs the cell.
    """
    waiting = sorted(rank for rank, one in where.items() if one.waits)
    elsewhere = sorted(where.keys() - waiting)
    silent = sorted(host_of.keys() - where.keys())
    words = [f"rank {rank}@{host_of[rank]} is at {_at(where[rank])}" for rank in elsewhere]
    words += [f"rank {rank}@{host_of[rank]} does not answer" for rank in silent]
    if waiting:
        others = "the others wait" if words else "all ranks wait"
        steps = sorted({where[rank].step for rank in waiting})
        words.append(f"{others} in a collective of step {formatting.ranks(steps)}")
    stacks: dict[str, list[int]] = {}
    for rank, one in where.items():
        stacks.setdefault(one.stack, []).append(rank)
    told = (f"rank {formatting.ranks(ranks)}:\n{stack}" for stack, ranks in stacks.items() if stack)
    return "\n".join(["; ".join(words), *told])


def _at(where: Where) -> str:
    return ", ".join(filter(None, (where.place, f"step {where.step}" if where.step else "")))
