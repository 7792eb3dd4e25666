"""Training loops in functions of an exported program, whose steps run on all replicas."""

from __future__ import annotations

import ast
import inspect
import linecache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.worker.lifting import module_loops, rewritten_loops
from nbdist.worker.lifting.definitions import first_line, replace_code

if TYPE_CHECKING:
    from nbdist.records import StrategyName


class ProgramLoops:
    """Functions and classes that a program marks, with loops that have not been rewritten yet.

    They are rewritten before the first block that may call them: all names that their loops use
    exist by then, as in a notebook.

    Args:
        namespace: names of the program.
        strategy: strategy of the program.
    """

    def __init__(self, namespace: dict[str, Any], strategy: StrategyName) -> None:
        self._namespace = namespace
        self._strategy = strategy
        self._marked: list[FunctionType | type] = []

    def mark(self, definition: Any) -> None:
        """Add a function, or a class with its methods.

        Raises:
            UsageError: it is neither.
        """
        if not isinstance(definition, (FunctionType, type)):
            raise UsageError("@job.lift marks functions and classes: put it directly above `def`")
        self._marked.append(definition)

    def rewrite(self) -> None:
        """Let the marked functions run their training loops as steps over all replicas.

        Loops in the user's modules do so too.
        """
        module_loops.lift_modules(self._namespace, self._strategy)
        while self._marked:
            definition = self._marked.pop(0)
            path, node = _located(definition)
            source = "".join(linecache.getlines(path))
            tree = ast.Module(body=[node], type_ignores=[])
            changed = rewritten_loops.rewritten(tree, source, self._namespace, self._strategy)
            if changed is not None:
                replace_code([definition], compile(changed, path, "exec", dont_inherit=True))


def _located(definition: FunctionType | type) -> tuple[str, ast.stmt]:
    """Return the file of a definition, and its node there.

    Raises:
        UsageError: its source is not in a file.
    """
    try:
        path = inspect.getsourcefile(definition)
        _, first = inspect.getsourcelines(definition)
    except (OSError, TypeError):
        path, first = None, 0
    if path is not None:
        for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and first_line(node) == first:
                return path, node
    raise UsageError(f"@job.lift: the source of {definition.__name__} is in no file")
