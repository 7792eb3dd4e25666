"""Three things that ipykernel does to an engine, and must not.

**A top-level `await` hangs the engine for ever.** `IPythonKernel.do_execute` compares the current
thread with `shell_channel_thread.parent_thread` to decide whether SIGINT may cancel the cell.
ipyparallel's engines have no shell channel thread: the attribute is None, the handler raises
outside of any reply, and the client waits for ever. Came with
https://github.com/ipython/ipykernel/pull/1455 (7.1).

**An interrupt ends the engine, or loses a reply.** While any request is handled, SIGINT raises
KeyboardInterrupt wherever the engine happens to be: a signal that arrives just after the user's
code has ended unwinds ipykernel itself. Our cells take
SIGINT in the user's code and nowhere else (`worker/cell_runner.py`), so the handler stays out.

**An engine imports a debugger**, a third of a second each time; nobody can reach it there.

Seen with ipykernel 7.4.0 and ipyparallel 9.2.0; `tests/worker/test_ipykernel_patch.py` fails when
one is no longer needed.
"""

from __future__ import annotations

import importlib
import sys
import threading

import ipykernel
from ipyparallel.engine.kernel import IPythonParallelKernel

FIRST_AFFECTED = (7, 1)
FIRST_UNTESTED = (7, 5)


class _MainThreadOnly:
    """Stands for a shell channel thread that is not there: falsy, its parent the main thread."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def apply() -> None:
    """Mend engines of the affected versions; leave others as they are."""
    if FIRST_AFFECTED <= ipykernel.version_info[:2] < FIRST_UNTESTED:
        IPythonParallelKernel._supports_kernel_subshells = property(lambda _kernel: False)
        IPythonParallelKernel.shell_channel_thread = _MainThreadOnly()
        IPythonParallelKernel.pre_handler_hook = lambda _kernel: None
        IPythonParallelKernel.post_handler_hook = lambda _kernel: None


def import_without_debugger() -> None:
    """Import what engines have of ipykernel's as if there were no debugpy; users still have it."""
    if "debugpy.server" in sys.modules:
        return
    sys.modules["debugpy.server"] = None  # type: ignore[assignment]  # Python's word for "not there"
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy.server"]
