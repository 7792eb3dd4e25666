"""Comparison of the ranks at the end of a cell: replicated values, and modules from their disks."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager
from msgspec import structs

from nbdist.cells.names import Names
from nbdist.errors import StepError
from nbdist.records import Failure
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import CellEnded, CellRequest, Replicated, StrategyName

_MOST_NAMES = 5
_ADVICE: dict[StrategyName, str] = {
    "pjrt": (
        "Usual causes: a key from the clock (jax.random.key(time.time_ns())), random.Random() "
        "without a seed, a condition on the rank. Use a constant seed, as in jax.random.key(0), "
        "or the generators of NumPy, which nbdist seeds. Keep values of one rank in NumPy, or on "
        "a device of that rank: jax.device_put(x, jax.local_devices()[0]). Use --guard 0 to skip "
        "the comparison"
    ),
    "mirrored": (
        "Usual causes: random.Random() without a seed, an update on some ranks only (a condition "
        "on the rank), moving means that each replica updates in strategy.run. Use a constant "
        "seed, or the generators of NumPy, which nbdist seeds. Run updates on all ranks. Use "
        "BatchNormalization(synchronized=True) in strategy.run. Keep values of one rank in NumPy, "
        "or in tf.Variable(..., trainable=False). On GPUs, call "
        "tf.config.experimental.enable_op_determinism(). Use --guard 0 to skip the comparison"
    ),
}
_EXPECTED: dict[StrategyName, str] = {
    "pjrt": "but JAX treats them as replicated",
    "mirrored": "but TensorFlow treats them as mirrored",
}


def different_modules(ended: Mapping[int, CellEnded]) -> CellEnded | None:
    """Compare the modules that ranks have imported from the disks of their hosts.

    Args:
        ended: the end of the cell on each rank.

    Returns:
        The end of the first rank that differs, as a failure whose message contains the modules.
        None if ranks that import the same module have the same file.
    """
    found: dict[str, dict[int, str]] = {}
    for rank, end in sorted(ended.items()):
        for name, digest in end.disk_modules.items():
            found.setdefault(name, {})[rank] = digest
    differing = {name: of for name, of in sorted(found.items()) if len(set(of.values())) > 1}
    if not differing:
        return None
    lines, first = [], 0
    for name, digests in differing.items():
        odd, usual = _parted(digests)
        lines.append(f"`{name}` of rank {formatting.ranks(odd)} differs from that of rank {usual}")
        first = odd[0]
    text = (
        f"the ranks have imported different files from the disks of their hosts: "
        f"{', '.join(lines)}. Put the modules beside the notebook, in a folder of `sys.path`, or "
        "copy them to all hosts, then run %dist_restart"
    )
    failure = Failure(ename=StepError.__name__, evalue=text, traceback=(), same=text)
    return structs.replace(ended[first], status="error", failure=failure)


def drifted(request: CellRequest, ended: Mapping[int, CellEnded]) -> CellEnded | None:
    """Compare the digests of all ranks.

    Args:
        request: the cell.
        ended: the end of the cell on each rank. If a rank failed, nothing is compared.

    Returns:
        The end of the first rank that differs, as a failure whose message contains the names of
        the values. None if all values are equal.
    """
    if request.strategy is None or any(end.status != "ok" for end in ended.values()):
        return None
    found: dict[str, dict[int, Replicated]] = {}
    for rank, end in sorted(ended.items()):
        for each in end.replicated:
            found.setdefault(each.name, {})[rank] = each
    differing = {name: of_ranks for name, of_ranks in found.items() if _differ(of_ranks)}
    if not differing:
        return None
    first = next(iter(differing.values()))
    odd, usual = _parted({rank: each.number for rank, each in first.items()})
    text = _text(request.strategy, _named(request, differing), odd, usual)
    failure = Failure(ename=StepError.__name__, evalue=text, traceback=(), same=text)
    return structs.replace(ended[odd[0]], status="error", failure=failure)


def _differ(of_ranks: Mapping[int, Replicated]) -> bool:
    """Return True if values differ and this cell changed one. Older differences were reported."""
    changed = any(each.changed for each in of_ranks.values())
    return changed and len({each.number for each in of_ranks.values()}) > 1


def _named(request: CellRequest, differing: Mapping[str, Mapping[int, Replicated]]) -> list[str]:
    """Return the paths whose values differ, each with the line that binds its name."""
    lines = _lines(request.source)
    named = dict.fromkeys(
        f"`{path}`" + (f" (line {lines[name]})" if name in lines else "")
        for name, of_ranks in differing.items()
        for path in _paths(name, of_ranks)
    )
    return list(named)


def _text(strategy: StrategyName, paths: list[str], odd: list[int], usual: int) -> str:
    more = f" and {len(paths) - _MOST_NAMES} more" if len(paths) > _MOST_NAMES else ""
    who = (
        f"Rank {formatting.ranks(odd)} differs"
        if len(odd) == 1
        else f"Ranks {formatting.ranks(odd)} differ"
    )
    return (
        f"values differ between ranks, {_EXPECTED[strategy]}: "
        f"{', '.join(paths[:_MOST_NAMES])}{more}. {who} from rank {usual}. {_ADVICE[strategy]}"
    )


def _paths(name: str, of_ranks: Mapping[int, Replicated]) -> list[str]:
    """Return the paths under a name whose values differ.

    Values are matched by position: libraries number their objects in paths, and the numbers may
    differ between ranks. If the ranks report different numbers of paths, the name itself is
    returned.
    """
    first, *others = (each.parts for each in of_ranks.values())
    if not first or any(len(parts) != len(first) for parts in others):
        return [name]
    columns = zip(*(parts.values() for parts in (first, *others)), strict=True)
    return [path for path, column in zip(first, columns, strict=True) if len(set(column)) > 1]


def _parted(numbers: Mapping[int, int] | Mapping[int, str]) -> tuple[list[int], int]:
    """Return the ranks that differ from the most frequent values, and the first other rank."""
    (most, _), *_ = Counter(numbers.values()).most_common(1)
    odd = [rank for rank, number in numbers.items() if number != most]
    return odd, next(rank for rank, number in numbers.items() if number == most)


def _lines(source: str) -> dict[str, int]:
    """Return the first line of the cell that binds each name."""
    names = Names()
    names.scan(ast.parse(TransformerManager().transform_cell(source)).body)
    return names.bound
