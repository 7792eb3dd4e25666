"""Modules of the user that a program imports, which stand beside it as files."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class OwnModules(NamedTuple):
    """Modules that belong to no installed package.

    Attributes:
        files: file of each module, by its path beside the program; all Python files of a package.
        missing: names of modules that this process does not find.
    """

    files: dict[Path, Path]
    missing: list[str]


def own_modules(names: Iterable[str]) -> OwnModules:
    """Find the user's modules of these names at the top level, and those that they import."""
    seen = {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names}
    found = OwnModules({}, [])
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        files = dict(_files(name))
        if not files:
            found.missing.append(name)
        for path in files.values():
            waiting.extend(_imported(path))
        found.files.update(files)
    return found


def _files(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a module, each with its path beside the program."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            yield Path(name, path.relative_to(folder)), path
    if spec.submodule_search_locations is None and spec.origin and spec.origin.endswith(".py"):
        yield Path(f"{name}.py"), Path(spec.origin)


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules at the top level that a file imports; none of a file that is no Python."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
