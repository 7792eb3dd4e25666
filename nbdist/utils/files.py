"""Files that are replaced as a whole, and read without following links."""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PLACEMENT_FILE = "placement.html"
"""In a cluster's folder: where arrays were when `%dist_show` last looked, as HTML."""


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write the file: who opens it finds the old content or the new.

    Args:
        path: the file.
        content: all of it.
        mode: who may read it, less what the process's mask takes.

    Raises:
        OSError: it could not be written; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.new")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(temporary, "wb", opener=opener) as file:
        file.write(content)
    temporary.replace(path)


class LateFiles:
    """Replaces files on a thread, in the order asked for: nobody waits for the disk.

    What cannot be written, as on a full disk, is left out.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "nbdist-files")

    def replace(self, path: Path, content: bytes, mode: int) -> None:
        self._thread.submit(_try_to_replace, path, content, mode)

    def settle(self) -> None:
        """Wait until all is written."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is left; nothing is taken any more."""
        self._thread.shutdown()


def _try_to_replace(path: Path, content: bytes, mode: int) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, content, mode)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """The content of a file, where neither it nor its folder is a link.

    Raises:
        OSError: there is none, one of the two is a link, or it is longer than the limit.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)

    try:
        with open(path.name, "rb", opener=opener) as file:
            content = file.read(limit_bytes + 1)
    finally:
        os.close(folder)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content
