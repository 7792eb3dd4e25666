"""What `@autoplace` has chosen, kept in a file for the next process: SQLite, of several at once."""

from __future__ import annotations

import contextlib
import functools
import logging
import sqlite3
from typing import TYPE_CHECKING

import msgspec

from nbdist.records.autoplace import Decision
from nbdist.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TABLE = "decisions_1"
"""Its number is that of the schema and of what a fingerprint is made of. Versions of nbdist that
differ in it share the file and not the table."""

_MADE = f"""CREATE TABLE IF NOT EXISTS {_TABLE}
    (fingerprint TEXT PRIMARY KEY, function TEXT NOT NULL, made REAL NOT NULL, body BLOB NOT NULL)
"""
_WAIT_S = 10.0
"""For the other processes that write; one takes milliseconds."""

_log = logging.getLogger(__name__)


class Choices:
    """The decisions in a file.

    Where the file cannot be read or written there are none, none is kept, and it is said once.

    Args:
        path: of the file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_said = False

    def get(self, fingerprint: str) -> Decision | None:
        """What was chosen for it; None where nothing was."""
        rows = self._rows(f"SELECT body FROM {_TABLE} WHERE fingerprint = ?", fingerprint)  # noqa: S608
        return rows[0] if rows else None

    def of(self, function: str) -> list[Decision]:
        """All of a function, the oldest first."""
        return self._rows(f"SELECT body FROM {_TABLE} WHERE function = ? ORDER BY made", function)  # noqa: S608

    def put(self, decision: Decision) -> None:
        """Keep it, in place of an earlier one of the same fingerprint."""
        body = msgspec.json.encode(decision)
        values = decision.fingerprint, decision.function, decision.made, body
        with self._heard(), self._open() as opened:
            opened.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?)", values)  # noqa: S608

    def forget(self, function: str) -> None:
        """Drop all of a function."""
        if self.path.exists():
            with self._heard(), self._open() as opened:
                opened.execute(f"DELETE FROM {_TABLE} WHERE function = ?", (function,))  # noqa: S608

    def _rows(self, query: str, value: str) -> list[Decision]:
        rows: list[tuple[bytes]] = []
        if self.path.exists():
            with self._heard(), self._open() as opened:
                rows = opened.execute(query, (value,)).fetchall()
        return [decision for (body,) in rows if (decision := self._read(body))]

    def _read(self, body: bytes) -> Decision | None:
        try:
            return msgspec.json.decode(body, type=Decision)
        except (msgspec.DecodeError, TypeError) as error:
            self._say(error)
            return None

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction; SQLite's rollback journal is what works on NFS, too."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as opened, opened:
            opened.execute(_MADE)
            yield opened

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            _log.warning(
                "@autoplace measures anew in each process, as %s cannot be used (%s): remove the "
                "file, or set NBDIST_PLACEMENTS to another path",
                self.path,
                error,
            )


@functools.cache
def users() -> Choices:
    """The user's own, in the file that the environment names."""
    return Choices(Settings.from_environment().placements_path)
