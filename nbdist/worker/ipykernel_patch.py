"""Patches of three behaviours of ipykernel that break an engine.

**A top-level `await` hangs the engine forever.** `IPythonKernel.do_execute` compares the current
thread with `shell_channel_thread.parent_thread` to decide whether SIGINT may cancel the cell.
ipyparallel's engines have no shell channel thread: the attribute is None, the handler raises
outside of any reply, and the client waits forever. Introduced by
https://github.com/ipython/ipykernel/pull/1455 (7.1). Earlier versions compare with the main thread.

**An interrupt ends the engine, or loses a reply.** While ipykernel handles any request, SIGINT
raises KeyboardInterrupt at the current line of the engine. A signal that arrives just after the
user's code has ended unwinds ipykernel itself. nbdist accepts SIGINT only in the user's code
(`worker/cell_runner.py`), so the patch disables ipykernel's handler.

**An engine imports a debugger.** This takes a third of a second, and no client can connect to it.

Observed with ipykernel 6.29.5, 7.0.1 and 7.4.0, and ipyparallel 9.0.2 to 9.2.0.
`tests/worker/test_ipykernel_patch.py` fails when a patch is no longer needed.
"""

from __future__ import annotations

import importlib
import sys
import threading

import ipykernel
from ipyparallel.engine.kernel import IPythonParallelKernel

from nbdist.private_api.ipykernel import INTERRUPTS

FIRST_WITH_SUBSHELL_CHECK = (7, 1)


class _MainThreadOnly:
    """Stand-in for the missing shell channel thread: falsy, with the main thread as its parent."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def apply() -> None:
    """Patch engines of the tested ipykernel versions; for other versions log a warning."""
    effect = "an interrupt can end an engine, and a cell with `await` can hang it"
    if not INTERRUPTS.is_supported(effect):
        return
    IPythonParallelKernel.pre_handler_hook = lambda _kernel: None
    IPythonParallelKernel.post_handler_hook = lambda _kernel: None
    if ipykernel.version_info[:2] >= FIRST_WITH_SUBSHELL_CHECK:
        IPythonParallelKernel._supports_kernel_subshells = property(lambda _kernel: False)
        IPythonParallelKernel.shell_channel_thread = _MainThreadOnly()


def import_without_debugger() -> None:
    """Import ipykernel's debugger module without debugpy; user code can still import debugpy."""
    if "debugpy.server" in sys.modules:
        return
    sys.modules["debugpy.server"] = None  # type: ignore[assignment]  # None: import raises
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy.server"]
