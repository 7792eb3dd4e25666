"""Incremental reader of a run."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from nbdist.records import CaughtUp, MediaMessage, StateMessage, TableMessage
from nbdist.telemetry.annotations import renamed
from nbdist.telemetry.media import MediaIndex
from nbdist.telemetry.tables import FLOAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import RunState, ServerMessage, Table
    from nbdist.telemetry.run_reader import StoredRun

FRAME_BYTES = 1 << 20
LOOK_S = 1.0
"""Interval in seconds of checks that the writer still exists: it may exit without a final state."""


def encoded(message: ServerMessage) -> str:
    return msgspec.json.encode(message).decode()


class News(Protocol):
    """Messages about a run for one browser."""

    @property
    def is_over(self) -> bool:
        """True if the run had ended at the last call of `news`."""
        ...

    def news(self) -> Iterator[str | bytes]:
        """Yield the data that was not sent yet. Texts are JSON.

        Raises:
            OSError: the directory was deleted.
            msgspec.DecodeError: the directory contains no run of this version.
        """
        ...

    def last(self) -> Iterator[str | bytes]:
        """Yield data that was written but not sent before the directory was deleted."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class States:
    """State of the run, sent after each change."""

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
        state = renamed(self._run.state(), self._run.path)
        if state != self._state:
            self._state = state
            yield encoded(StateMessage(state=state))


class Tail:
    """State, tables and index of media of a run.

    A binary message contains the number of a table, then rows.

    Reads only after the last message was sent. A slow browser therefore delays only itself.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._states = States(run)
        self._tables: list[Table] = []
        self._sent_rows: list[int] = []
        self._media = MediaIndex(run.media_path)
        self._caught_up = False

    @property
    def is_over(self) -> bool:
        return self._states.is_over

    def last(self) -> Iterator[str | bytes]:
        yield from ()

    def close(self) -> None:
        self._media.close()

    def news(self) -> Iterator[str | bytes]:
        yield from self._states.news()
        for index in range(self._find_tables()):
            yield from self._new_rows(index)
        while entries := self._media.news(FRAME_BYTES):
            yield encoded(MediaMessage(entries=entries))
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def _find_tables(self) -> int:
        """Return the number of tables. Consecutive numbers make it needless to list the folder."""
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
                # The rows may replace rows that a recovery voids. The state with that recovery was
                # written before them, and has to be sent first.
                yield from self._states.news()
                yield number + rows
