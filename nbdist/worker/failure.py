"""Description of the exception that ended a cell on this rank: frames of the user, no others."""

from __future__ import annotations

import asyncio
import re
import site
import sysconfig
from pathlib import Path
from traceback import format_exception_only, format_tb
from types import TracebackType
from typing import Any

from nbdist.errors import AnotherRankError, NbdistError
from nbdist.records import Failure
from nbdist.utils.error_text import without_library_frames
from nbdist.worker.runtime.shell import cell_name, place, source

_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "jaxpr"))
_INSTALLED = (*site.getsitepackages(), sysconfig.get_path("stdlib"))
_GENERATED = "__autograph_generated_file"
"""Part of the names of files with code that AutoGraph has made of the user's."""
_IMPORTS = "<frozen importlib"
"""Start of the names of files of Python's import system."""
_FILTER = str(Path("util", "traceback_utils.py"))
"""End of the file of TensorFlow that raises an error again without TensorFlow's frames."""
_DEFECTS = AssertionError, AttributeError, LookupError, NameError
"""Errors that show the last frame, also one of nbdist: they can be defects of nbdist."""
_QUOTED_FILE = re.compile(r'File "([^"\n]*)", line')


def describe(error: BaseException, shell: Any, *, follows: bool) -> Failure:
    """Return the exception with its traceback.

    Args:
        error: the exception.
        shell: IPython's shell, which formats tracebacks; None in a program.
        follows: True if the failure of another rank caused the error.
    """
    own = user_frames(error)
    if isinstance(error, NbdistError):  # its message is complete: our own frames would not help
        return _failure(error, [], own, follows=isinstance(error, AnotherRankError))
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
        return _failure(error, _innermost(own), own, follows=follows)
    if follows or shell is None:
        lines = [line.rstrip() for line in format_tb(own)]  # plain: rarely read
        return _failure(error, [*lines, _last_line(error)] if lines else [], own, follows=follows)
    try:
        lines = shell.InteractiveTB.structured_traceback(type(error), error, own, 0)
    except Exception as trouble:  # noqa: BLE001 - an exception whose own repr raises
        lines = [f"{type(error).__name__} (its traceback could not be shown: {trouble!r})"]
    if isinstance(error, SyntaxError) and not cell_name(error.filename or ""):
        lines = [line.rstrip() for line in format_exception_only(error)]  # with file and line
    return _failure(error, [_readable(line) for line in lines], own, follows=False)


def message(error: BaseException) -> str:
    """Return the message of an exception, also of one whose `__str__` raises."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001 - the exception's own code raises anything
        return f"(its message could not be shown: {trouble!r})"


def _failure(
    error: BaseException, lines: list[str], own: TracebackType | None, *, follows: bool
) -> Failure:
    text = _readable(message(error))
    if lines and not any(text in line for line in lines):
        lines = [*lines, _last_line(error)]
    return Failure(
        ename=type(error).__name__,
        evalue=text,
        traceback=tuple(lines),
        same=f"{type(error).__name__}:{own.tb_lineno if own else 0}",
        follows=follows,
    )


def _last_line(error: BaseException) -> str:
    name, text = type(error).__name__, _readable(message(error))
    return f"{name}: {text}" if text else name


def _readable(text: str) -> str:
    """Return a text without frames of libraries, and with `Cell In[3]` for the file of a cell."""
    text = without_library_frames(text, _is_library)
    return _QUOTED_FILE.sub(lambda file: f"{cell_name(file[1]) or file[0][:-6]}, line", text)


def user_frames(error: BaseException) -> TracebackType | None:
    """Keep the frames of the user's code, and the last frame, where the error was raised.

    IPython takes seconds to format the many frames of the libraries between them. TensorFlow names
    the user's lines in the message of an error in code that AutoGraph has made.
    """
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _GENERATED not in file and not file.startswith(_IMPORTS):
            frames.append(traceback)
        traceback = traceback.tb_next
    own = [f for f in frames[:-1] if not _is_library(f.tb_frame.f_code.co_filename)]
    last = [f for f in frames[-1:] if not own or not _only_passes(f, error)]
    chain: TracebackType | None = None
    for frame in reversed([*own, *last]):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chain


def _only_passes(frame: TracebackType, error: BaseException) -> bool:
    """Return True for a frame that only passes on an error: TensorFlow removed those below it."""
    file = frame.tb_frame.f_code.co_filename
    is_ours = file.startswith(_OURS) and not isinstance(error, _DEFECTS)
    return is_ours or file.endswith(_FILTER)


def _innermost(traceback: TracebackType | None) -> list[str]:
    """Return the innermost place in the user's code, with its line; empty without one."""
    places = []
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        if not _is_library(frame.f_code.co_filename):
            places = [f"{place(frame, line)}: {source(frame, line)}"]
        traceback = traceback.tb_next
    return places


def _is_library(filename: str) -> bool:
    return filename.startswith(_OURS) or any(part in filename for part in _INSTALLED)
