"""Content that stays in memory while it is small, and is written to a file when it is large."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_UNLIMITED = 1 << 62


class Spool:
    """Receiver of a pickle, for a `with` block that deletes its file at the end.

    Large content stays in memory if the disk is full.

    Args:
        path: the file for large content. It is created with mode 0600 when it is needed.
        limit_bytes: the largest content that stays in memory.

    Attributes:
        path: the file.
        size: the number of bytes written.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.size = 0
        self._stays = False
        self._limit = limit_bytes
        self._file: io.BytesIO | io.FileIO = io.BytesIO()

    @property
    def is_file(self) -> bool:
        """True if the content is in the file."""
        return not isinstance(self._file, io.BytesIO)

    def write(self, data: bytes | memoryview | pickle.PickleBuffer) -> int:
        """Append bytes, and return their number."""
        view = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
        try:
            if not self.is_file and self.size + view.nbytes > self._limit:
                self._move()
            _append(self._file, view)
        except OSError:  # the disk is full, or the folder is gone
            self._return()
            _append(self._file, view)
        self.size += view.nbytes
        return view.nbytes

    def content(self) -> bytes:
        """Return the whole content."""
        if isinstance(self._file, io.BytesIO):
            return self._file.getvalue()
        with self.path.open("rb") as file:
            return file.read(self.size)

    def keep(self) -> None:
        """Let the file stay after the `with` block."""
        self._stays = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._stays:
            self.path.unlink(missing_ok=True)

    def _move(self) -> None:
        """Move the content from memory to the file."""
        before = self.content()
        number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(io.FileIO(number, "wb"))
            _append(file, memoryview(before))
            undo.pop_all()
        self._file = file

    def _return(self) -> None:
        """Move the content back to memory, and leave it there."""
        before = self.content()
        self._file.close()
        self.path.unlink(missing_ok=True)
        self._file = io.BytesIO()
        self._file.write(before)
        self._limit = _UNLIMITED


def _append(file: io.BytesIO | io.FileIO, view: memoryview) -> None:
    """Write all bytes. The operating system writes at most 2 GiB at once."""
    done = 0
    while done < view.nbytes:
        done += file.write(view[done:])
