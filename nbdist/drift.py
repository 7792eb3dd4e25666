"""Ranks that have gone their own ways in a cell, and have not noticed."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager
from msgspec import structs

from nbdist.cells.names import Names
from nbdist.errors import StepError
from nbdist.records import Failure
from nbdist.views import labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import CellEnded, CellRequest, Replicated

_MOST_NAMES = 5
_ADVICE = (
    "Usual causes: a key from the clock (jax.random.key(time.time_ns())), "
    "np.random.default_rng() without a seed, a condition on the rank. Use a constant seed, as in "
    "jax.random.key(0) and np.random.default_rng(0), or NumPy's global generator, which nbdist "
    "seeds. Keep values of the rank's own in NumPy, or on a device of its own: "
    "jax.device_put(x, jax.local_devices()[0]). --guard 0 leaves the comparison out"
)


def drifted(request: CellRequest, ended: Mapping[int, CellEnded]) -> CellEnded | None:
    """The end of the first rank with other values in arrays that all claim to have alike.

    Args:
        request: the cell.
        ended: how each rank did; one that failed tells more itself.

    Returns:
        The rank's end as a failure that names the arrays; None if all are alike.
    """
    if any(end.status != "ok" for end in ended.values()):
        return None
    found: dict[str, dict[int, Replicated]] = {}
    for rank, end in sorted(ended.items()):
        for each in end.replicated:
            found.setdefault(each.name, {})[rank] = each
    differing = {name: of_ranks for name, of_ranks in found.items() if _differ(of_ranks)}
    if not differing:
        return None
    odd, usual = _parted(next(iter(differing.values())))
    text = _text(request, differing, odd, usual)
    failure = Failure(ename=StepError.__name__, evalue=text, traceback=(), same=text)
    return structs.replace(ended[odd[0]], status="error", failure=failure)


def _differ(of_ranks: Mapping[int, Replicated]) -> bool:
    """Whether the cell has made what differs: what it only reads was reported before."""
    made = any(each.parts for each in of_ranks.values())
    return made and len({each.number for each in of_ranks.values()}) > 1


def _text(
    request: CellRequest,
    differing: Mapping[str, Mapping[int, Replicated]],
    odd: list[int],
    usual: int,
) -> str:
    lines = _lines(request.source)
    paths = [
        f"`{path}`" + (f" (line {lines[name]})" if name in lines else "")
        for name, of_ranks in differing.items()
        for path in _paths(name, of_ranks)
    ]
    more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
    who = f"rank {labels.ranks(odd)} has" if len(odd) == 1 else f"ranks {labels.ranks(odd)} have"
    return (
        f"not the same on all ranks, though JAX takes it for replicated: "
        f"{', '.join(paths[:_MOST_NAMES])}{more}. {who} other values than rank {usual}. {_ADVICE}"
    )


def _paths(name: str, of_ranks: Mapping[int, Replicated]) -> list[str]:
    """Those under a name whose values differ; the name, if ranks have not reported the same."""
    first, *others = (each.parts for each in of_ranks.values())
    if not first or any(parts.keys() != first.keys() for parts in others):
        return [name]
    return [path for path, number in first.items() if any(o[path] != number for o in others)]


def _parted(of_ranks: Mapping[int, Replicated]) -> tuple[list[int], int]:
    """The ranks that have other values than most, and the first that has most's."""
    numbers = {rank: each.number for rank, each in of_ranks.items()}
    (most, _), *_ = Counter(numbers.values()).most_common(1)
    odd = [rank for rank, number in numbers.items() if number != most]
    return odd, next(rank for rank, number in numbers.items() if number == most)


def _lines(source: str) -> dict[str, int]:
    """Where the cell binds each name first."""
    names = Names()
    names.scan(ast.parse(TransformerManager().transform_cell(source)).body)
    return names.bound
