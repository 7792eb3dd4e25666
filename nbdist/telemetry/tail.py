"""What is new in a run since the last look."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from nbdist.records import CaughtUp, StateMessage, TableMessage
from nbdist.telemetry.tables import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import RunState, ServerMessage, Table
    from nbdist.telemetry.run_reader import StoredRun

FRAME_BYTES = 1 << 20
LOOK_S = 1.0
"""How often the writer is looked at: it may be gone without having said so."""


def encoded(message: ServerMessage) -> str:
    return msgspec.json.encode(message).decode()


class News(Protocol):
    """What one browser is told of a run."""

    @property
    def is_over(self) -> bool:
        """Whether the run had ended at the last look."""
        ...

    def news(self) -> Iterator[str | bytes]:
        """What there is now and was not sent: texts are JSON.

        Raises:
            OSError: the directory is gone.
            msgspec.DecodeError: it holds no run of this version.
        """
        ...

    def last(self) -> Iterator[str | bytes]:
        """What was written before the directory was deleted, and was not sent."""
        ...

    def close(self) -> None:
        """Nobody asks for more."""
        ...


class States:
    """The run's state, whenever it is another."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._written = b""
        self._looked_at = 0.0
        self._state: RunState | None = None

    @property
    def is_over(self) -> bool:
        return self._state is not None and self._state.is_over

    def news(self) -> Iterator[str]:
        written = self._run.written()
        now = time.monotonic()
        if written == self._written and now - self._looked_at < LOOK_S:
            return
        self._written, self._looked_at = written, now
        state = self._run.state()
        if state != self._state:
            self._state = state
            yield encoded(StateMessage(state=state))


class Tail:
    """The state, and the tables with their rows: bytes, rows after their table's number.

    Nothing is read before the last message has been taken: a slow browser holds up itself only.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._states = States(run)
        self._tables: list[Table] = []
        self._sent_rows: list[int] = []
        self._caught_up = False

    @property
    def is_over(self) -> bool:
        return self._states.is_over

    def last(self) -> Iterator[str | bytes]:
        yield from ()

    def close(self) -> None: ...

    def news(self) -> Iterator[str | bytes]:
        yield from self._states.news()
        for index in range(self._find_tables()):
            yield from self._new_rows(index)
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def _find_tables(self) -> int:
        """Their number. They are numbered from 0: no folder is listed many times a second."""
        while (table := self._run.table(len(self._tables))) is not None:
            self._tables.append(table)
            self._sent_rows.append(-1)
        return len(self._tables)

    def _new_rows(self, index: int) -> Iterator[str | bytes]:
        table = self._tables[index]
        if self._sent_rows[index] < 0:
            self._sent_rows[index] = 0
            yield encoded(TableMessage(table=table))
        row_bytes = FLOAT_BYTES * len(table.columns.names)
        most = max(1, (FRAME_BYTES - FLOAT_BYTES) // row_bytes)
        number = struct.pack("<d", table.number)
        count = most
        while count == most:
            rows = self._run.rows(table, self._sent_rows[index], most)
            count = len(rows) // row_bytes
            self._sent_rows[index] += count
            if rows:
                # They may stand for rows that a state voids, which was written before them.
                yield from self._states.news()
                yield number + rows
