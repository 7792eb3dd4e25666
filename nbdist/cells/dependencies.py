"""Which cells made what a run uses: read from their names, for making it again on a fresh worker.

A cell is needed when it binds or changes a name that is needed, by the run or by a needed cell
after it. What training has changed is not made again: a checkpoint has it. What a cell then made of
that, and no checkpoint has, cannot be: whoever asks is told.
"""

from __future__ import annotations

import ast
import builtins
import functools
from typing import TYPE_CHECKING, Literal

import msgspec
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cells.names import Names
from nbdist.errors import ReplayError
from nbdist.records import CellRequest  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TRAINING = {"fit", "train_on_batch"}
"""Methods that train what they belong to."""

_CHANGING = {"next", "setattr", "delattr", "exec"}
"""Of Python's own functions, those that change what they are given."""


class CellNames(msgspec.Struct, frozen=True):
    """What a cell does with names.

    Attributes:
        reads: names that it takes from the namespace.
        binds: names that it binds, perhaps only on some path.
        sure: those of them that it binds whatever happens.
        changes: names whose values it may change in place.
        trains: names whose values it trains.
        imports: modules that it imports.
    """

    reads: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    sure: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True):
    """Something that has been done to the workers.

    Attributes:
        kind: a cell that ran once, a step cell, or objects that were pushed.
        names: what it did with names.
        ranks: where.
        request: the cell; None of what was pushed.
        payload: what was pushed, pickled.
        once: it is not to be done again.
        failed: nobody knows how far it came.
    """

    kind: Literal["cell", "step", "push"]
    names: CellNames
    ranks: tuple[int, ...]
    request: CellRequest | None = None
    payload: bytes = b""
    once: bool = False
    failed: bool = False

    @property
    def place(self) -> str:
        """As prompts have it: `[3]`."""
        return "%dist_push" if self.request is None else f"[{self.request.label}]"


@functools.lru_cache(maxsize=8)
def names_of(source: str) -> CellNames:
    """What a cell of Python, or IPython's own syntax, does with names; nothing where it is none."""
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError):
        return CellNames()
    names = Names()
    names.scan(tree.body)
    own = set(vars(builtins))
    return CellNames(
        reads=tuple(sorted(names.read.keys() - own)),
        binds=tuple(sorted(names.bound)),
        sure=tuple(sorted(name for name in names.bound if names.is_sure(name))),
        changes=tuple(sorted(set(_changed(tree)) - own)),
        trains=tuple(sorted(set(_trained(tree)))),
        imports=tuple(dict.fromkeys(_imported(tree))),
    )


def needed(
    entries: Sequence[Entry], run: CellNames, saved: Iterable[str], world_size: int
) -> list[Entry]:
    """What has to be done again so that a run finds what it uses, in its order.

    Args:
        entries: all that was done before the run.
        run: the run's names.
        saved: names whose values its checkpoint has.
        world_size: the number of ranks.

    Raises:
        ReplayError: something cannot be done again; says what.
    """
    chosen = _chosen(entries, run, world_size)
    faults = list(_faults(entries, chosen, set(run.reads) - set(saved)))
    if faults:
        raise ReplayError("; ".join(faults))
    return [entries[i] for i in sorted(chosen)]


def _chosen(entries: Sequence[Entry], run: CellNames, world_size: int) -> set[int]:
    """Backwards from the run: who binds or changes what is needed."""
    wanted, chosen = set(run.reads), set()
    for i in range(len(entries) - 1, -1, -1):
        entry, names = entries[i], entries[i].names
        if entry.kind == "step" or wanted.isdisjoint((*names.binds, *names.changes)):
            continue
        chosen.add(i)
        if len(entry.ranks) >= world_size:  # it may have been larger
            wanted -= set(names.sure)
        wanted |= set(names.reads)
    return chosen


def _faults(entries: Sequence[Entry], chosen: set[int], unsaved: set[str]) -> Iterator[str]:
    """What cannot be made again, and that the run uses without having saved it."""
    stale: dict[str, str] = {}
    for i, entry in enumerate(entries):
        names = entry.names
        if i in chosen and entry.once:
            yield f"{entry.place} is marked --once, and makes {_listed(names.binds)}"
        made = dict.fromkeys((*names.binds, *names.changes))
        if i in chosen and entry.failed:
            yield f"{entry.place} was not run to its end, and may have made {_listed(made)}"
        if i in chosen and not stale.keys().isdisjoint(names.reads):
            of = next(name for name in names.reads if name in stale)
            stale |= dict.fromkeys(made, f"{entry.place} made it of `{of}`, which was trained")
        elif i in chosen:
            for name in names.sure:
                stale.pop(name, None)
        stale |= dict.fromkeys(names.trains, f"{entry.place} trained it")
    for name in sorted(unsaved & stale.keys()):
        yield f"`{name}`: {stale[name]}"


def _changed(tree: ast.Module) -> Iterator[str]:
    """Names whose values a statement may change: `a.b = 1`, `a[0] += 1`, `a.append(1)`, `f(a)`."""
    for node in _outside_functions(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            yield from _root(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _changed_by(node.value)
    yield from _trained(tree)


def _changed_by(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Attribute):
        yield from _root(call.func)
    elif isinstance(call.func, ast.Name):
        name = call.func.id
        if name in vars(builtins) and name not in _CHANGING:
            return
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        if isinstance(value, ast.Name):
            yield value.id


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in _outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _trained(tree: ast.Module) -> Iterator[str]:
    for node in _outside_functions(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method) as func) if method in TRAINING:
                yield from _root(func)


def _root(node: ast.expr) -> Iterator[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _outside_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the cell does."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
