"""Request of the front end that the kernel currently executes."""

from __future__ import annotations

import contextlib
import os
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
    """Origin of the current cell.

    Attributes:
        id: id of the request message, empty without a front end.
        cell: id of the cell in its notebook, empty if the front end did not send it.
        deleted: ids of the cells that the user has deleted since the request before. JupyterLab
            and Jupyter Notebook send them.
    """

    id: str = ""
    cell: str = ""
    deleted: tuple[str, ...] = ()


def kernel_app() -> Any:
    """Return the application of the running kernel. None in a terminal or a program.

    `IPKernelApp.initialized` is also true under another IPython application, such as the terminal.
    """
    with contextlib.suppress(MultipleInstanceError):
        return IPKernelApp.instance() if IPKernelApp.initialized() else None
    return None


def this_request() -> Request:
    """Return the request that runs the current cell."""
    app = kernel_app()
    if app is None:
        return Request()
    message = app.kernel.get_parent("shell")
    metadata = message.get("metadata", {})
    cell, deleted = str(metadata.get("cellId", "")), metadata.get("deletedCells") or ()
    return Request(message.get("header", {}).get("msg_id", ""), cell, tuple(map(str, deleted)))


def notebook_path() -> str:
    """Return the path of the notebook when its kernel started. Empty without a Jupyter server."""
    return os.environ.get("JPY_SESSION_NAME", "") if kernel_app() is not None else ""


def kernel_ends(meanwhile: Callable[[float], None]) -> bool:
    """Return True if the front end shuts the kernel down, with or without a restart.

    The front end first sends an interrupt and shortly afterwards the shutdown request. This
    function waits for that request.

    Args:
        meanwhile: function called repeatedly during the wait, with a duration in seconds.
    """
    deadline = time.monotonic() + _KERNEL_ENDS_S
    while (app := kernel_app()) is not None and time.monotonic() < deadline:
        if app.kernel.shell.exit_now:
            return True
        meanwhile(_POLL_S)
    return False
