"""Cells of an exported program: checks, and their source without magics."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.cells.names import Names
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.cells.dependencies import Entry
    from nbdist.records import CellRequest, Plan, StrategyName

INJECTED = ("rank", "world_size", "report", "strategy", "mesh")
"""Names that nbdist defines on the workers, as attributes of a job in a program."""

_OF_NOTEBOOK = {"get_ipython", "display"}
_OF_PAGE = {
    **dict.fromkeys(("ipywidgets", "IPython", "anywidget", "ipyparallel", "google.colab"), ""),
    "tqdm.notebook": ", and `tqdm.auto` does not",
}
"""Modules for the page of a notebook, with what else to use."""
_ADVICE = (
    "move it to a cell that the training does not need, %dist_restart, and run the cells again"
)


@dataclass(frozen=True)
class JobCell:
    """A cell of a program.

    Attributes:
        request: the cell as it ran.
        tree: its statements.
        names: names that it reads and binds.
        plan: its layout, which the program uses on as many devices; None to plan it.
    """

    request: CellRequest
    tree: ast.Module
    names: Names
    plan: Plan | None = None

    @property
    def label(self) -> int:
        """Execution count of the cell in the notebook."""
        return self.request.label


def job_cells(entries: Sequence[Entry], strategy: StrategyName, world_size: int) -> list[JobCell]:
    """Return the cells of a program after checks.

    Args:
        entries: the needed cells and pushed objects, and last the cell that trains.
        strategy: strategy of the cell that trains.
        world_size: number of ranks.

    Raises:
        UsageError: cells cannot run in a program. The message contains all faults.
    """
    cells, faults = [], []
    for entry in entries:
        if entry.request is None:
            continue
        found = list(_faults(entry, strategy, world_size))
        faults += found
        if not found:
            cells.append(_read(entry.request, entry.plan))
    if not faults:
        faults += _unresolved(cells, entries)
    if faults:
        raise UsageError("\n".join(f"cannot export {fault}" for fault in faults))
    return cells


def _read(request: CellRequest, plan: Plan | None) -> JobCell:
    tree = ast.parse(request.source)
    given = () if request.program is None else request.program.given
    names = Names(given)
    names.scan(tree.body)
    step = request.options.step
    if plan is None and step is not None:
        plan = step.planning.given
    return JobCell(request, tree, names, plan)


def _faults(entry: Entry, strategy: StrategyName, world_size: int) -> Iterator[str]:
    """Yield the reasons why a cell cannot run in a program."""
    request = entry.request
    assert request is not None
    place = f"cell [{request.label}]"
    try:
        tree = ast.parse(request.source)
    except SyntaxError as error:
        text = (error.text or "").strip()
        yield f"{place}, line {error.lineno}: `{text}` is no Python: {_ADVICE}"
        return
    if request.awaits:
        yield f"{place}: it uses `await`, which a program does not: call the function without it"
    if len(entry.ranks) < world_size:
        yield f"{place}: it ran on some ranks only: run it on all ranks, without --ranks"
    elif request.strategy != strategy:
        yield (
            f"{place}: it ran under {request.strategy}, and the training under {strategy}: run "
            f"it with --strategy {strategy}"
        )
    for node in ast.walk(tree):
        for text in _of_notebook(node):
            yield f"{place}, line {getattr(node, 'lineno', 0)}: {text}: {_ADVICE}"


def _of_notebook(node: ast.AST) -> Iterator[str]:
    """Yield the uses of the notebook or its page in a node."""
    match node:
        case ast.Name(id=name) if name in _OF_NOTEBOOK:
            yield f"`{name}` needs a notebook"
        case ast.Import(names=aliases):
            yield from _of_page([alias.name for alias in aliases])
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            yield from _of_page([module]) or _of_page([f"{module}.{a.name}" for a in aliases])


def _of_page(modules: Sequence[str]) -> list[str]:
    """Return the modules for the page of a notebook."""
    return [
        f"`{name}` needs a notebook{instead}"
        for name in modules
        for module, instead in _OF_PAGE.items()
        if f"{name}.".startswith(f"{module}.")
    ]


def _unresolved(cells: Sequence[JobCell], entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the names that no cell of the program and no pushed object defines."""
    known = {*INJECTED, *vars(builtins)}
    known |= {name for cell in cells for name in cell.names.bound}
    known |= {name for e in entries if e.request is None for name in e.names.binds}
    for cell in cells:
        for name, line in cell.names.read.items():
            if name not in known and "*" not in known:  # from module import *
                yield (
                    f"cell [{cell.label}], line {line}: no cell of these workers defines `{name}`: "
                    "run the cell that creates it with %%dist_run, or copy it with %dist_push"
                )
        step = cell.request.step
        if step is not None and step.options.data not in known:
            yield (
                f"cell [{cell.label}]: no cell of these workers defines `{step.options.data}` "
                "(--data): run the cell that creates it with %%dist_run"
            )
