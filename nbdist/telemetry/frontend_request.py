"""The front end's request that the kernel is carrying out."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ipykernel.kernelapp import IPKernelApp
from traitlets.config import MultipleInstanceError

if TYPE_CHECKING:
    from collections.abc import Callable

_KERNEL_ENDS_S = 0.5
_POLL_S = 0.05


@dataclass(frozen=True)
class Request:
    """Who asked for the current cell.

    Attributes:
        id: the message's; empty where there is no front end.
        cell: the cell's id in its notebook; empty where the front end has not told.
    """

    id: str = ""
    cell: str = ""


def kernel_app() -> Any:
    """Return the application of the running kernel; None in a terminal and in a program.

    `IPKernelApp.initialized` is also true under another application of IPython, the terminal's.
    """
    with contextlib.suppress(MultipleInstanceError):
        return IPKernelApp.instance() if IPKernelApp.initialized() else None
    return None


def this_request() -> Request:
    """The request that runs the current cell."""
    app = kernel_app()
    if app is None:
        return Request()
    message = app.kernel.get_parent("shell")
    cell = message.get("metadata", {}).get("cellId", "")
    return Request(message.get("header", {}).get("msg_id", ""), str(cell))


def kernel_ends(meanwhile: Callable[[float], None]) -> bool:
    """Whether the front end asks the kernel to end, so as to restart it or not.

    It interrupts it first, and asks within a moment, which is waited for.

    Args:
        meanwhile: takes so many seconds of it.
    """
    deadline = time.monotonic() + _KERNEL_ENDS_S
    while (app := kernel_app()) is not None and time.monotonic() < deadline:
        if app.kernel.shell.exit_now:
            return True
        meanwhile(_POLL_S)
    return False
