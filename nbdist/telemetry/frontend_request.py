"""The front end's request that the kernel is carrying out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipykernel.kernelapp import IPKernelApp

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


def this_request() -> Request:
    """The request that runs the current cell."""
    if not IPKernelApp.initialized():
        return Request()
    message = IPKernelApp.instance().kernel.get_parent("shell")
    cell = message.get("metadata", {}).get("cellId", "")
    return Request(message.get("header", {}).get("msg_id", ""), str(cell))


def kernel_ends(meanwhile: Callable[[float], None]) -> bool:
    """Whether the front end asks the kernel to end, so as to restart it or not.

    It interrupts it first, and asks within a moment, which is waited for.

    Args:
        meanwhile: takes so many seconds of it.
    """
    deadline = time.monotonic() + _KERNEL_ENDS_S
    while IPKernelApp.initialized() and time.monotonic() < deadline:
        if IPKernelApp.instance().kernel.shell.exit_now:
            return True
        meanwhile(_POLL_S)
    return False
