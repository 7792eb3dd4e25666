"""The front end's request that the kernel is carrying out."""

from __future__ import annotations

from dataclasses import dataclass

from ipykernel.kernelapp import IPKernelApp


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
