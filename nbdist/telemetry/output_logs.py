"""Complete text output of every rank, one file each."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TextIO

from nbdist.records import Display, Output

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import AnyEvent


class OutputLogs:
    """Log files of the ranks' output. They are never truncated.

    Args:
        folder: folder of the files, one per rank.

    Attributes:
        fault: reason why text is missing, empty if it is complete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, TextIO] = {}
        self._closed = False
        self.fault = ""
        self._lock = threading.Lock()

    def take(self, record: AnyEvent) -> None:
        """Append the record's text, if it has a text form."""
        if isinstance(record, Output):
            self._append(record.rank, record.text)
        elif isinstance(record, Display) and "text/plain" in record.data:
            self._append(record.rank, f"{record.data['text/plain']}\n")

    def _append(self, rank: int, text: str) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                if rank not in self._files:
                    self._files[rank] = self.path(rank).open("a", encoding="utf-8")
                self._files[rank].write(text)
            except OSError as error:  # a full disk must not stop the display of text
                self._append_message(error)

    def path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.out"

    def read(self, rank: int) -> str:
        """Return all text of the rank."""
        with self._lock:
            if rank in self._files:
                self._flush(self._files[rank])
        path = self.path(rank)
        fault = f"[{self.fault}]\n" if self.fault else ""
        return (path.read_text(encoding="utf-8") if path.exists() else "") + fault

    def flush(self) -> None:
        """Write buffered text to the file system."""
        with self._lock:
            for file in self._files.values():
                self._flush(file)

    def close(self) -> None:
        """Close the files. Later text is ignored, because a thread may still deliver some."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                self._flush(file)
                with contextlib.suppress(OSError):
                    file.close()
            self._files.clear()

    def _flush(self, file: TextIO) -> None:
        try:
            file.flush()
        except OSError as error:
            self._append_message(error)

    def _append_message(self, error: OSError) -> None:
        self.fault = f"cannot store all text of the ranks: {error}"
