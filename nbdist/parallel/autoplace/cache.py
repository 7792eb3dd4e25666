"""Choices of `@autoplace` in an SQLite file, which several processes share."""

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
"""The number counts versions of the schema and of the fingerprint. Versions of nbdist with other
numbers use the same file and other tables."""

_MADE = f"""CREATE TABLE IF NOT EXISTS {_TABLE}
    (fingerprint TEXT PRIMARY KEY, function TEXT NOT NULL, made REAL NOT NULL, body BLOB NOT NULL)
"""
_WAIT_S = 10.0
"""Time limit for writes of other processes, which take milliseconds."""

_log = logging.getLogger(__name__)


class Choices:
    """The decisions in a file.

    If the file cannot be used, there are no stored decisions, none is stored, and a warning is
    logged once.

    Args:
        path: path of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False

    def get(self, fingerprint: str) -> Decision | None:
        """Return the decision for a fingerprint; None if there is none."""
        rows = self._rows(f"SELECT body FROM {_TABLE} WHERE fingerprint = ?", fingerprint)  # noqa: S608
        return rows[0] if rows else None

    def of(self, function: str) -> list[Decision]:
        """Return all decisions of a function, oldest first."""
        return self._rows(f"SELECT body FROM {_TABLE} WHERE function = ? ORDER BY made", function)  # noqa: S608

    def put(self, decision: Decision) -> None:
        """Store a decision; it replaces an earlier one with the same fingerprint."""
        body = msgspec.json.encode(decision)
        values = decision.fingerprint, decision.function, decision.made, body
        with self._logged_errors(), self._open() as opened:
            opened.execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?)", values)  # noqa: S608

    def forget(self, function: str) -> None:
        """Delete all decisions of a function."""
        if self.path.exists():
            with self._logged_errors(), self._open() as opened:
                opened.execute(f"DELETE FROM {_TABLE} WHERE function = ?", (function,))  # noqa: S608

    def _rows(self, query: str, value: str) -> list[Decision]:
        rows: list[tuple[bytes]] = []
        if self.path.exists():
            with self._logged_errors(), self._open() as opened:
                rows = opened.execute(query, (value,)).fetchall()
        return [decision for (body,) in rows if (decision := self._read(body))]

    def _read(self, body: bytes) -> Decision | None:
        try:
            return msgspec.json.decode(body, type=Decision)
        except (msgspec.DecodeError, TypeError) as error:
            self._warn(error)
            return None

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one transaction. SQLite's rollback journal also works on NFS."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(self.path, timeout=_WAIT_S)) as opened, opened:
            opened.execute(_MADE)
            yield opened

    @contextlib.contextmanager
    def _logged_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "@autoplace measures again in each process, because %s cannot be used "
                "(%s): remove the file, or set NBDIST_PLACEMENTS to another path",
                self.path,
                error,
            )


@functools.cache
def users() -> Choices:
    """Return the user's own choices, in the file that the environment names."""
    return Choices(Settings.from_environment().placements_path)
