"""Complete text output of every rank, one file each."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TextIO

from nbdist.records import CellEnded, Display, Output
from nbdist.utils.error_text import described

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import AnyEvent, Failure

LOG_FOLDER = "log"
"""Folder with the output of all cells in the folder of a cluster."""


class OutputLogs:
    """Log files of the ranks' output. They are never truncated.

    A heading precedes the text of each cell that `begin` names.

    Args:
        folder: folder of the files, one per rank.

    Attributes:
        fault: reason why text is missing, empty if it is complete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, TextIO] = {}
        self._cell, self._name = 0, ""
        self._headed: set[int] = set()
        self._is_flushed = True
        self._closed = False
        self.fault = ""
        self._lock = threading.Lock()

    def begin(self, cell: int, name: str) -> None:
        """Write a heading before the next text of each rank.

        Args:
            cell: number of the cell that begins.
            name: name in the heading.
        """
        with self._lock:
            self._cell, self._name = cell, " ".join(name.split())
            self._headed.clear()

    def take(self, record: AnyEvent) -> None:
        """Append the record's text, if it has a text form. An error of a cell has one."""
        if isinstance(record, Output):
            self._append(record, record.text)
        elif isinstance(record, Display) and "text/plain" in record.data:
            self._append(record, f"{record.data['text/plain']}\n")
        elif isinstance(record, CellEnded) and record.status == "error" and record.failure:
            self._append(record, f"{_text_of(record.failure)}\n")

    def _append(self, record: Output | Display | CellEnded, text: str) -> None:
        rank = record.rank
        with self._lock:
            if self._closed:
                return
            try:
                is_first = rank not in self._files
                if is_first:
                    self._files[rank] = self.path(rank).open("a", encoding="utf-8")
                if record.cell == self._cell and self._name and rank not in self._headed:
                    self._headed.add(rank)
                    space = "" if is_first and not self._files[rank].tell() else "\n"
                    self._files[rank].write(f"{space}── {self._name} ──\n")
                self._files[rank].write(text)
                self._is_flushed = False
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
        if self._is_flushed:
            return
        with self._lock:
            self._is_flushed = True
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


def _text_of(failure: Failure) -> str:
    """Return the traceback of an error, or its message if it has none.

    If the error of another rank caused it, return one line.
    """
    text = described(failure.ename, failure.evalue)
    return text.split("\n")[0] if failure.follows else "\n".join(failure.traceback) or text
