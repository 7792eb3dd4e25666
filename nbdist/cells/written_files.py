"""Files that cells write and later cells read, found by the literal paths in their code."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nbdist.cells.value_parts import passed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_WRITING = re.compile(
    r"(save|to_|write|dump|export|imwrite|tofile|get_file|urlretrieve|sink_|copy|move)"
)
"""Beginning of the names of functions and methods that write files."""

_READING = re.compile(r"(copy|move|get_file$)")
"""Beginning of those of these names whose functions also read a file."""

_OPENING = {"open", "fopen", "File", "GFile"}
"""Functions that write a file if their mode is one of `_MODES`."""

_MODES = set("wax+")
_PATHS = {"Path", "PurePath", "PosixPath"}


class WrittenFiles:
    """Files that the cells of a notebook write.

    Args:
        trees: syntax trees of all cells, in order. A name stands for a path if all cells assign one
            text to it.
    """

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._paths = _named_paths(trees)
        self._written = [{*self._of(tree, _writes)} for tree in trees]
        self._read = [{*self._of(tree, _reads)} for tree in trees]

    def writers(self, chosen: Collection[int]) -> set[int]:
        """Return the indices of the cells that wrote a file before a chosen cell reads it."""
        return {
            i
            for i, written in enumerate(self._written)
            if any(k > i and not written.isdisjoint(self._read[k]) for k in chosen)
        }

    def created(self) -> set[str]:
        """Return the paths that a cell writes before another one reads them."""
        found, known = set[str](), set[str]()
        for written, read in zip(self._written, self._read, strict=True):
            found |= written - known
            known |= read
        return found

    def _of(self, tree: ast.Module, has_effect: Callable[[ast.Call], bool]) -> Iterator[str]:
        """Yield the paths that the calls of a cell name which read or write files."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and has_effect(node):
                for part in (*passed(node), *_owner(node)):
                    for text in _text_of(part, self._paths):
                        yield from _files(text, is_written=has_effect is _writes)


def _owner(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the parts of the object whose method a call is, as in `Path("a").write_text(...)`."""
    if isinstance(call.func, ast.Attribute):
        yield from ast.walk(call.func.value)


def _text_of(node: ast.AST, paths: Mapping[str, str]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if text:
            yield text
        case ast.Name(id=name) if name in paths:
            yield paths[name]


def _files(text: str, *, is_written: bool) -> Iterator[str]:
    """Yield a text if it may be a path; `numpy.save` appends `.npy` or `.npz` to a bare name."""
    if "." in text or "/" in text:
        yield text
    if is_written:
        yield from (f"{text}.npy", f"{text}.npz")


def _writes(call: ast.Call) -> bool:
    """Return True if a call may write the file whose path it names."""
    name = _name_of(call)
    if name in _OPENING:
        own = [*call.args[not isinstance(call.func, ast.Attribute) :], *_mode(call)]
        return any(isinstance(n, ast.Constant) and _is_mode(n.value) for n in own)
    return bool(_WRITING.match(name))


def _reads(call: ast.Call) -> bool:
    """Return True if a call may read the file whose path it names: most that do not write one."""
    return bool(_READING.match(_name_of(call))) or not _writes(call) or _appends(call)


def _name_of(call: ast.Call) -> str:
    """Return the name of the function or method."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def _appends(call: ast.Call) -> bool:
    words = [*call.args, *_mode(call)]
    modes = [n.value for n in words if isinstance(n, ast.Constant) and _is_mode(n.value)]
    return any(not {"a", "+"}.isdisjoint(mode) for mode in modes if isinstance(mode, str))


def _mode(call: ast.Call) -> Iterator[ast.expr]:
    return (keyword.value for keyword in call.keywords if keyword.arg == "mode")


def _is_mode(value: object) -> bool:
    """Return True for a mode such as `w`, `ab` or `r+`."""
    return isinstance(value, str) and set(value) <= set("rwaxbt+") and not _MODES.isdisjoint(value)


def _named_paths(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Return the names to which all cells together assign one text, with the text."""
    found: dict[str, set[str | None]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).add(_literal(node.value))
    return {
        name: text
        for name, texts in found.items()
        for text in texts
        if len(texts) == 1 and text is not None
    }


def _literal(value: ast.expr) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=function, args=[ast.Constant(value=str(text))], keywords=[]) if (
            ast.unparse(function).rpartition(".")[2] in _PATHS
        ):
            return text
    return None
