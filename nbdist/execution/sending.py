"""Sending of a cell, and of commands about it, to the ranks that run it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nbdist.errors import WorkerError
from nbdist.records import StatusQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.cluster.dispatcher import Dispatcher
    from nbdist.records import CellRequest, Command


class CellSender:
    """Sender of one cell and of commands about it.

    Args:
        number: the number of the cell.
        dispatcher: sends to ranks.

    Attributes:
        number: the number of the cell.
        running: the ranks that run the cell. The caller removes a rank that has ended it.
    """

    def __init__(self, number: int, dispatcher: Dispatcher) -> None:
        self.number = number
        self.running: set[int] = set()
        self._dispatcher = dispatcher

    def send(self, request: CellRequest, ranks: Iterable[int]) -> None:
        """Send the cell.

        Raises:
            WorkerError: a rank cannot be reached. The ranks before it run the cell.
        """
        unsent = sorted(ranks)
        try:
            self.running.update(unsent)
            while unsent:
                self._dispatcher.send(request, unsent[:1])
                del unsent[0]
        finally:
            self.running.difference_update(unsent)

    def send_command(self, command: Command, ranks: Sequence[int]) -> None:
        """Send a command. Skip unreachable ranks: the monitor reports them as dead."""
        for rank in ranks:
            with contextlib.suppress(WorkerError):
                self._dispatcher.send(command, [rank])

    def request_status(self, ranks: Iterable[int]) -> None:
        """Request the ends of the ranks again. Ranks that have not begun the cell drop it."""
        self.send_command(StatusQuery(number=self.number), sorted(ranks))
