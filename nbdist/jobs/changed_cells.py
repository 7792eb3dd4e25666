"""Cells of a program that were deleted from the notebook, or edited, after they ran.

The kernel does not know the text of the notebook. It knows the cells that ran, with their ids, and
the ids of the cells that JupyterLab has deleted.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import tree_of_cell
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.cells.dependencies import Entry


def refuse_deleted(chosen: Sequence[Entry], every: Sequence[Entry]) -> None:
    """Refuse a program that needs deleted cells.

    A cell counts as present if other cells that ran contain all its statements at their top level,
    as after cut and paste.

    Args:
        chosen: entries of the program; the last one trains.
        every: all entries.

    Raises:
        UsageError: the program needs a deleted cell. The message contains all of them.
    """
    present = set().union(*(_statements(entry) for entry in every if not entry.deleted))
    faults = [
        _fault(entry, chosen[i + 1 :])
        for i, entry in enumerate(chosen)
        if entry.deleted and not _statements(entry) <= present
    ]
    if faults:
        raise UsageError(
            "\n".join(f"cannot export {fault}" for fault in faults)
            + "\nPut the code into a cell and run that cell, or train again without it"
        )


def edited_cells(chosen: Sequence[Entry], every: Sequence[Entry]) -> Iterator[str]:
    """Yield remarks about cells of a program that ran again later with another text.

    Args:
        chosen: entries of the program.
        every: all entries.
    """
    newest = {entry.cell: entry for entry in every if entry.cell}
    for entry in chosen:
        last = newest.get(entry.cell, entry)
        if _text(last) != _text(entry):
            contained = "both texts, in the order in which they ran"
            if all(one is not last for one in chosen):
                contained = f"the text of {entry.place}"
            yield (
                f"cell {entry.place} ran again as {last.place} with another text: the program "
                f"contains {contained}"
            )


def _text(entry: Entry) -> object:
    """Return the statements of a cell and its options, for comparison."""
    if entry.request is None:
        return None
    return ast.dump(tree_of_cell(entry.request.source)), entry.request.options


def _statements(entry: Entry) -> set[str]:
    """Return the statements at the top level of a cell."""
    if entry.request is None:
        return set()
    return {ast.dump(statement) for statement in tree_of_cell(entry.request.source).body}


def _fault(entry: Entry, later: Sequence[Entry]) -> str:
    if not later:
        return f"cell {entry.place}: it was deleted from the notebook"
    read = {name for other in later for name in other.names.reads}
    names = [name for name in entry.names.binds if name in read] or [*entry.names.changes]
    named = ", ".join(f"`{name}`" for name in names)
    return f"cell {later[-1].place}: {named} comes from cell {entry.place}, which was deleted"
