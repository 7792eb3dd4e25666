"""Remarks about cells that a program leaves out although they may change its numbers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import (
    CellNames,
    Wanted,
    outside_functions,
    possible_changes,
    present,
    tree_of_cell,
)
from nbdist.cells.value_parts import passed
from nbdist.cells.written_files import WrittenFiles
from nbdist.jobs.gradient_loops import GradientLoops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.cells.dependencies import Entry, OwnTexts

_ITERATES = {"iter", "next", "list", "enumerate", "zip", "tqdm"}

_LONGEST_PATH = 255
_MAGIC = frozenset("*?[")
"""Characters of a pattern of files."""
_SHUFFLES = ("shuffle", "_from_directory")
"""Words of code that creates data sets whose order changes with each iteration."""


def remarks(
    chosen: Sequence[Entry], every: Sequence[Entry], own_texts: OwnTexts | None = None
) -> list[str]:
    """Return what may make the numbers of a program differ from those of the notebook.

    Args:
        chosen: entries of the program.
        every: all entries until its last one.
        own_texts: texts of the user's own modules.
    """
    own = {id(entry) for entry in chosen}
    left = [entry for entry in every if id(entry) not in own]
    drew = [entry.place for entry in left if entry.drew]
    shuffles = any(
        e.request is not None and any(word in e.request.source for word in _SHUFFLES)
        for e in chosen
    )
    bound = {name for entry in chosen for name in entry.names.binds}
    read = [
        entry.place
        for entry in left
        if shuffles and not entry.drew and not bound.isdisjoint(_iterated(entry))
    ]
    found = []
    for places, reason in ((drew, "drew random numbers"), (read, "read shuffled data")):
        if places:
            cells = "cell" if len(places) == 1 else "cells"
            found.append(f"{cells} {', '.join(places)}, left out of the program, {reason}")
    return [
        *(
            f"{text}: its numbers may differ from the notebook's as with another seed. For equal "
            "numbers, restart the workers, run only the other cells, and export again"
            for text in found
        ),
        *(
            f"cell {place}, left out of the program, may have changed {names}: the program's "
            "numbers then differ from the notebook's. Put such statements into a cell that creates "
            "these values, run the cells again on new workers, and export again"
            for place, names in _changing(own, every, own_texts)
            if place not in (*drew, *read)
        ),
    ]


def later_loops(before: Sequence[Entry], later: Sequence[Entry]) -> list[str]:
    """Return a remark about training loops that ran as written after an exported training.

    Args:
        before: all entries until the exported training.
        later: all entries after it.
    """
    left = [e for e in later if not (e.trained or e.failed or e.names.trains)]
    if not left:
        return []
    trees = {
        id(e): tree_of_cell(e.request.source) for e in (*before, *later) if e.request is not None
    }
    loops = GradientLoops([*trees.values()])
    functions = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and loops.within(node)
    }
    places = [e.place for e in left if id(e) in trees and _trains(trees[id(e)], loops, functions)]
    if not places:
        return []
    start, be = ("loop of cell", "is") if len(places) == 1 else ("loops of cells", "are")
    text = (
        f"the training {start} {', '.join(places)} ran later, as written on every worker, and {be} "
        "not in the program: only steps on all replicas can be exported"
    )
    return [text]


def _trains(tree: ast.Module, loops: GradientLoops, functions: set[str]) -> bool:
    """Return True if a cell runs a loop that may take gradients, or a function with one."""
    for node in outside_functions(tree):
        match node:
            case ast.For() | ast.While() if loops.within(node):
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in functions:
                return True
    return False


def _changing(
    own: set[int], every: Sequence[Entry], own_texts: OwnTexts | None
) -> Iterator[tuple[str, str]]:
    """Yield cells that a program leaves out, and the names that they may have changed for it.

    Args:
        own: ids of the entries of the program.
        every: all entries until its last one.
        own_texts: texts of the user's own modules.
    """
    wanted = Wanted(every, CellNames())
    found = []
    chosen = [i for i, entry in enumerate(every) if id(entry) in own]
    possible = present(every, possible_changes(every, own_texts), chosen)
    for entry, changes in reversed([*zip(every, possible, strict=True)]):
        if id(entry) in own:
            wanted.add(entry.names, is_on_all=True)
        elif names := sorted((changes.names & wanted.used()) | changes.settings):
            found.append((entry.place, ", ".join(f"`{name}`" for name in names)))
    return reversed(found)


def edits(
    chosen: Sequence[Entry], files: Iterable[Path], digests: Mapping[str, str]
) -> Iterator[str]:
    """Yield the user's own modules that were edited after cells of a program ran.

    Args:
        chosen: entries of the program.
        files: files of modules, by their paths beside the program.
        digests: digest of each module that the workers have now.
    """
    for name in dict.fromkeys(path.parts[0].removesuffix(".py") for path in files):
        cells = [
            e.place for e in chosen if e.modules.get(name, digests.get(name)) != digests.get(name)
        ]
        if cells:
            yield (
                f"the module `{name}` was edited after {', '.join(cells)} ran: the program has the "
                "newest text of the workers. For equal numbers, run these cells again, and export "
                "again"
            )


def files_beside(chosen: Sequence[Entry], files: Iterable[Path]) -> list[str]:
    """Return a remark about files beside the notebook that cells of a program name in a call.

    Files that these cells write themselves are left out.

    Args:
        chosen: entries of the program.
        files: files that the program's folder contains, by their paths there.
    """
    trees = [tree_of_cell(entry.request.source) for entry in chosen if entry.request is not None]
    known = {path.as_posix() for path in files} | WrittenFiles(trees).created()
    named = {
        value.value: None
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for value in passed(node)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    found = [text for text in named if text not in known and _is_beside(text)]
    if not found:
        return []
    listed = ", ".join(f"`{text}`" for text in found)
    return [f"the cells name {listed} beside the notebook: copy it beside train.py, on all hosts"]


def _is_beside(text: str) -> bool:
    """Return True if a text is a relative path of a file, or of a folder or pattern with `/`."""
    path = Path(text)
    if len(text) > _LONGEST_PATH or path.is_absolute() or not path.name:
        return False
    if "/" in text and not _MAGIC.isdisjoint(text):
        return any(Path().glob(text))
    return path.is_file() or ("/" in text and path.is_dir())


def _iterated(entry: Entry) -> Iterator[str]:
    """Yield the names whose values a cell iterates over."""
    if entry.request is None:
        return
    try:
        tree = ast.parse(entry.request.source)
    except SyntaxError:
        return
    for node in outside_functions(tree):
        match node:
            case ast.For(iter=value) | ast.comprehension(iter=value):
                yield from _names(value)
            case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value):
                yield from _names(value)
            case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in _ITERATES:
                yield from _names(value)


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
