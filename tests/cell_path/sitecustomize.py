"""Recorder of call stacks, installed at the start of each Python process that has it on its path.

The test of a cell's path uses it in the notebook's process and in the engines. Until `start` it
records nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = f"{os.sep}nbdist{os.sep}"
CHECKS = ("cells/rank_comparison.py", "execution/health.py", "execution/module_sync.py")
"""Files of checks and preparation, which are no part of a cell's path.

On a busy machine checks send a query. The user's own modules are found before a cell, and the
values of the ranks are compared after it.
"""

_found: dict[str, set[str]] = {}
_is_on = False


def start() -> None:
    global _is_on  # noqa: PLW0603
    _is_on = True


def stop() -> dict[str, list[str]]:
    """Stop, and return the files of nbdist on the stacks of each kind of event."""
    global _is_on  # noqa: PLW0603
    _is_on = False
    return {kind: sorted(files) for kind, files in _found.items()}


def screen(text: str) -> None:
    """Write to the screen; a call is an event."""
    sys.__stdout__.write(text)


def _record(frame: FrameType, event: str, argument: Any) -> None:
    if not _is_on:
        return
    kind = _kind(frame) if event == "call" else _kind_of_builtin(event, argument)
    if kind and not (files := _files(frame)) & _of_checks():
        _found.setdefault(kind, set()).update(files)
        if kind == "user":  # a replica's thread, for which the main thread waits
            _found[kind].update(_files(_main_frame(), "MainThread"))


def _kind(frame: FrameType) -> str:
    """Return the kind of event that the call of a Python function is; empty if none."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name in {"send", "send_multipart"} and f"{os.sep}zmq{os.sep}" in file:
        return "send"
    if name == "notify" and file == threading.__file__:
        return "hand over" if PACKAGE in _caller_of_threading(frame) else ""
    if name.endswith("users_function"):  # AutoGraph adds a prefix
        return "user"
    if name == "screen" and file == __file__:
        return "show"
    return "parse" if f"{PACKAGE}cells{os.sep}" in file else ""


def _kind_of_builtin(event: str, argument: Any) -> str:
    if event != "c_call":
        return ""
    return {"put": "hand over", "write": "write"}.get(argument.__name__, "")


def _caller_of_threading(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename if frame else ""


def _main_frame() -> FrameType:
    ident = threading.main_thread().ident
    assert ident is not None
    return sys._current_frames()[ident]


def _files(frame: FrameType | None, thread: str = "") -> set[str]:
    """Return the files of nbdist on a stack, with the thread that runs them."""
    found = set()
    thread = thread or threading.current_thread().name
    while frame is not None:
        _, package, file = frame.f_code.co_filename.rpartition(PACKAGE)
        if package:
            found.add(f"{thread}: {file}")
        frame = frame.f_back
    return found


def _of_checks() -> set[str]:
    return {f"{threading.current_thread().name}: {file}" for file in CHECKS}


threading.setprofile(_record)
sys.setprofile(_record)
