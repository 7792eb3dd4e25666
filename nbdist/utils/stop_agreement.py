"""Agreement of all ranks on the step after which they stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from nbdist.records import SOON, StopAfter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from nbdist.records import Command, Stopping

_LET_CONTINUE_S = 0.5
"""The time that a rank waits for the others before nbdist lets it continue."""


class Sender(Protocol):
    """Sends commands to the ranks of a cell."""

    @property
    def number(self) -> int:
        """The number of the cell."""
        ...

    def send_command(self, command: Command, ranks: Sequence[int]) -> None:
        """Send a command to some ranks."""
        ...


class StopAgreement:
    """Agreement on the step after which all ranks stop: the last step that any rank has reached.

    Ranks with independent steps drift apart. A rank that waits for the agreement may block another
    rank, for example in a comparison of states. nbdist then lets the first rank continue.

    Args:
        sender: sends to the ranks of the cell.
        step: returns the last step that a rank is known to have begun.
    """

    def __init__(self, sender: Sender, step: Callable[[int], int]) -> None:
        self._sender = sender
        self._step = step
        self._limits: dict[int, int] = {}
        self._is_agreed = False
        self._since = 0.0

    def receive(self, stopping: Stopping) -> None:
        """Store the last step that a rank reaches before it waits for the others."""
        self._limits[stopping.rank] = stopping.limit
        self._since = time.monotonic()

    def send_agreed_step(self, still: Set[int]) -> None:
        """Send the agreed step to the running ranks, after each has reported its last step.

        Args:
            still: the ranks that still run the cell.
        """
        if not self._limits or self._is_agreed:
            return
        if still <= self._limits.keys():
            self._is_agreed = True
            last = max(self._limits.values())
            self._sender.send_command(
                StopAfter(number=self._sender.number, step=last), sorted(still)
            )
        elif time.monotonic() - self._since > _LET_CONTINUE_S:
            self._since = time.monotonic()
            self._let_continue(still)

    def _let_continue(self, still: Set[int]) -> None:
        reached = max(map(self._step, still)) + 1
        behind = [r for r in sorted(still & self._limits.keys()) if self._limits[r] < reached]
        if behind:
            self._limits |= dict.fromkeys(behind, reached)
            command = StopAfter(number=self._sender.number, step=SOON, limit=reached)
            self._sender.send_command(command, behind)
