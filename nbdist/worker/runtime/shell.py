"""The IPython shell of this engine, or the namespace of an exported program."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from types import FrameType


def store_source(name: str, source: str) -> str:
    """Store a source for tracebacks and AutoGraph under the name of a file, and return the name."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return name


class ProgramCode:
    """Sources of code that nbdist makes of a program, in place of IPython's cells."""

    def cache(self, source: str, number: int) -> str:
        """Store a source for tracebacks, and return a file name for it."""
        name = f"{Path(sys.argv[0]).name}, block {number}"
        return store_source(name, source)

    def format_code_name(self, name: str) -> tuple[str, ...] | None:
        """Return None: files keep their names."""
        del name
        return None


@dataclass(frozen=True)
class ProgramShell:
    """Namespace and code of an exported program, in place of ipykernel's shell."""

    user_ns: dict[str, Any]
    compile: ProgramCode = field(default_factory=ProgramCode)


_program: list[ProgramShell] = []


def use_program(namespace: dict[str, Any]) -> None:
    """Use the namespace of a program as the user's. The process is no engine."""
    _program[:] = [ProgramShell(namespace)]


def is_program() -> bool:
    """Return True if this process runs an exported program, not the cells of a notebook."""
    return bool(_program)


def engine_shell() -> Any:
    """Return ipykernel's shell, whose namespace is the user's. Call it only on a rank."""
    return _program[0] if _program else get_ipython()


def place(frame: FrameType, line: int) -> str:
    """Format a place like IPython's tracebacks do: `Cell In[3], line 14`."""
    file = frame.f_code.co_filename
    return f"{cell_name(file) or file}, line {line}"


def cell_name(file: str) -> str:
    """Return the name of the cell whose code has this file name, `Cell In[3]`; empty for others."""
    return " ".join(engine_shell().compile.format_code_name(file) or ())


def source(frame: FrameType, line: int) -> str:
    """Return a line of the code of a frame, without its indentation."""
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
