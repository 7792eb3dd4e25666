"""Comparison of the ranks at the end of a cell: replicated values, and modules from their disks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager
from msgspec import structs

from nbdist.cells.names import Names
from nbdist.cells.rank_comparison import differing_values, parted
from nbdist.errors import StepError
from nbdist.records import Failure
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import CellEnded, CellRequest


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
        odd, usual = parted(digests)
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
    replicated = {rank: end.replicated for rank, end in ended.items()}
    found = differing_values(request.strategy, replicated, lambda: _lines(request.source))
    if found is None:
        return None
    failure = Failure(ename=StepError.__name__, evalue=found.text, traceback=(), same=found.text)
    return structs.replace(ended[found.rank], status="error", failure=failure)


def _lines(source: str) -> dict[str, int]:
    """Return the first line of the cell that binds each name."""
    names = Names()
    names.scan(ast.parse(TransformerManager().transform_cell(source)).body)
    return names.bound
