"""Modules of the user that cells import: their files, found as the notebook's kernel finds them."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import importlib.machinery
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cells.dependencies import tree_of_cell
from nbdist.errors import UsageError
from nbdist.utils.installed import INSTALLED, is_users_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MOST_BYTES = 64 << 20
"""Limit for the files of all modules together."""

_LEFT_OUT = ("__pycache__", "node_modules")
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
"""Statements that contain no others."""

_TRIES = 3
"""Reads of a file that changes while it is read."""


class SourceFile(NamedTuple):
    """Content of a file at one moment.

    Attributes:
        path: the file.
        digest: digest of the content.
        size_bytes: its size.
        imports: modules at the top level that it imports.
    """

    path: Path
    digest: str
    size_bytes: int
    imports: tuple[str, ...] = ()


class OwnModules(NamedTuple):
    """Modules that belong to no installed package.

    Attributes:
        files: file of each module, by its path beside the program.
        missing: names of modules that this process does not find.
    """

    files: dict[Path, SourceFile]
    missing: list[str]


class OwnModuleFinder:
    """Finder of the user's modules. It reads a file again only after a change.

    Args:
        folders: folders that are searched after `sys.path`. All their modules are found.
        exclude: patterns of names and of paths of files and folders that are left out.
        store: receives the digest and the content of each file that is read.

    Attributes:
        with_data: find also files of packages that are no Python.
    """

    def __init__(
        self,
        folders: Sequence[str] = (),
        exclude: Sequence[str] = (),
        store: Callable[[str, bytes], None] = lambda _digest, _content: None,
    ) -> None:
        self.with_data = False
        self._store = store
        self._folders = [str(Path(folder).expanduser().absolute()) for folder in folders]
        self._exclude = tuple(exclude)
        self._read: dict[Path, tuple[tuple[int, int], SourceFile]] = {}
        self._installed: set[str] = set()

    def find(self, names: Iterable[str]) -> OwnModules:
        """Find the user's modules of these names at the top level, and those that they import.

        Raises:
            UsageError: a file cannot be read, or a module has the name of another one.
        """
        found = OwnModules({}, [])
        seen, waiting = set(self._installed), [*names, *self._in_folders()]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            paths = self._paths(name)
            if self.with_data:
                _refuse_large([*(file.path for file in found.files.values()), *paths.values()])
            files = {beside: self._source(path) for beside, path in paths.items()}
            found.files.update(files)
            if not files and name not in self._installed:
                found.missing.append(name)
            waiting.extend(itertools.chain(*(file.imports for file in files.values())))
        return found

    def _in_folders(self) -> Iterator[str]:
        """Yield the modules in the further folders."""
        for folder in map(Path, self._folders):
            for path in sorted(folder.glob("*.py")):
                yield path.stem
            for path in sorted(folder.glob("*/__init__.py")):
                yield path.parent.name

    def _paths(self, name: str) -> dict[Path, Path]:
        """Return the files of a module, each by its path beside the program."""
        if name in sys.builtin_module_names:
            self._installed.add(name)
            return {}
        spec = _find_spec(name, self._folders)
        if spec is None:
            return {}
        inside = spec.submodule_search_locations
        place = spec.origin if spec.has_location else next(iter(inside or ()), None)
        if place is None or not is_users_file(name, place):
            self._installed.add(name)
            return {}
        _refuse_shadow(name, place)
        if inside is None:
            return {Path(f"{name}.py"): Path(place)} if place.endswith(".py") else {}
        paths = {
            Path(name, path.relative_to(folder)): path
            for folder in map(Path, inside)
            for path in self._inside(folder, Path(name))
        }
        return paths if any(path.suffix == ".py" for path in paths) else {}

    def _inside(self, folder: Path, beside: Path) -> Iterator[Path]:
        """Yield the files in a folder of a package, without those that belong to no program."""
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if self._is_left_out(entry.name, str(beside / entry.name)):
                continue
            path = Path(entry.path)
            if entry.is_symlink() and folder.resolve().is_relative_to(path.resolve()):
                continue  # it leads back to a folder around
            if entry.is_dir():
                if not (path / "pyvenv.cfg").exists():
                    yield from self._inside(path, beside / entry.name)
            elif path.suffix == ".py" or (self.with_data and path.suffix != ".pyc"):
                yield path

    def _is_left_out(self, name: str, beside: str) -> bool:
        if name.startswith(".") or name in _LEFT_OUT:
            return True
        return any(fnmatch.fnmatch(text, p) for p in self._exclude for text in (name, beside))

    def _source(self, path: Path) -> SourceFile:
        """Return the content of a file; read it if it is new or has changed."""
        known = self._read.get(path)
        try:
            if known is not None and known[0] == _stamp(path):
                return known[1]
            stamp, content = _stable_content(path)
        except OSError as error:
            raise UsageError(
                f"your module {path} cannot be read ({error.strerror}): make it readable, or "
                "leave it out by `exclude` (docs/clusters.md)"
            ) from None
        imports = imports_of_module(content) if path.suffix == ".py" else ()
        source = SourceFile(path, digest_of(content), len(content), imports)
        self._store(source.digest, content)
        self._read[path] = stamp, source
        return source

    def digests(self) -> set[str]:
        """Return the digests of the current contents of all files that were found."""
        return {source.digest for _, source in self._read.values()}


def digest_of(content: bytes) -> str:
    """Return the digest of a file's content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def imports_of_cell(source: str) -> tuple[str, ...]:
    """Return the modules at the top level that a cell imports; none of a cell that is no Python."""
    return tuple(dict.fromkeys(_imported(tree_of_cell(source)))) if "import" in source else ()


def imports_of_module(content: bytes) -> tuple[str, ...]:
    """Return the modules at the top level that a file imports; none of a file that is no Python."""
    return tuple(dict.fromkeys(_imported(_tree(content))))


def _stable_content(path: Path) -> tuple[tuple[int, int], bytes]:
    """Return the stamp and the content of a file, read between two changes."""
    for _ in range(_TRIES):
        stamp = _stamp(path)
        content = path.read_bytes()
        if stamp == _stamp(path):
            return stamp, content
    raise UsageError(f"{path} changes while it is read: run the cell again")


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _find_spec(name: str, folders: list[str]) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a top-level module, or None if no finder knows it. It imports nothing."""
    finder = importlib.machinery.PathFinder
    spec = finder.find_spec(name)
    if spec is None or not spec.has_location:  # installed with `pip install -e`, or in a folder
        others = (other for other in sys.meta_path if other is not finder)
        found = (other.find_spec(name, None) for other in others)
        spec = next((s for s in found if s is not None and s.has_location), spec)
    return spec or finder.find_spec(name, folders)


def _refuse_shadow(name: str, place: str) -> None:
    """Raise UsageError if a file of the user has the name of a module of Python or of a package."""
    owner = "Python's standard library" if name in sys.stdlib_module_names else ""
    if not owner:
        folders = [folder for folder in sys.path if folder.startswith(INSTALLED)]
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        owner = "an installed package" if spec is not None and spec.has_location else ""
    if owner:
        raise UsageError(
            f"your module {place} has the name of {owner}, so workers may import the other one: "
            "rename it"
        )


def _refuse_large(paths: Sequence[Path]) -> None:
    """Raise UsageError if files have more bytes together than nbdist sends."""
    sizes = {path: path.stat().st_size for path in paths if path.exists()}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise UsageError(
            f"the files of your modules have {sum(sizes.values()) >> 20} MiB, and nbdist copies at "
            f"most {MOST_BYTES >> 20} MiB: move the largest, {largest} ({sizes[largest] >> 20} "
            "MiB), out of its package, or leave it out by `exclude` (docs/clusters.md)"
        )


def _tree(content: bytes) -> ast.Module:
    """Return the syntax tree of a file; empty if it is no Python."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules at the top level that a file or cell imports, also in functions."""
    waiting: list[ast.AST] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif not isinstance(node, _SIMPLE):
            children = ast.iter_child_nodes(node)
            waiting.extend(reversed([c for c in children if not isinstance(c, ast.expr)]))
