"""Atomic replacement of files, and reads that do not follow links."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PLACEMENT_FILE = "placement.html"
"""File in a cluster's folder: the HTML of the array placement that `%dist_show` drew last."""


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically: a reader finds the old content or the new content.

    Args:
        path: the file.
        content: the whole new content.
        mode: permission bits, before the process's umask is applied.

    Raises:
        OSError: the file cannot be written. Its old content remains.
    """
    temporary = path.with_name(f".{path.name}.new")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(temporary, "wb", opener=opener) as file:
        file.write(content)
    temporary.replace(path)


class LateFiles:
    """Writer that replaces files on a thread, in the order of the calls.

    The caller does not wait for the disk. Writes that fail, for example on a full disk, are
    ignored.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "nbdist-files")

    def replace(self, path: Path, content: bytes, mode: int) -> None:
        self._thread.submit(_try_to_replace, path, content, mode)

    def settle(self) -> None:
        """Wait until all submitted writes are done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the submitted writes and accept no more."""
        self._thread.shutdown()


def _try_to_replace(path: Path, content: bytes, mode: int) -> None:
    with contextlib.suppress(OSError):
        replace_file(path, content, mode)


def read_file(path: Path, limit_bytes: int, *, own: bool = False) -> bytes:
    """Return the content of a file, without following a link to it or to its folder.

    Args:
        path: the file.
        limit_bytes: its largest size.
        own: True to refuse a file that another user owns or can change, or whose folder another
            user owns.

    Raises:
        OSError: the file does not exist, it or its folder is a link, it exceeds the limit, or it
            is refused.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

    try:
        if own:
            _require_owner(folder, path.parent)
        with open(path.name, "rb", opener=opener) as file:
            if own:
                _require_owner(file.fileno(), path, of_others=stat.S_IWGRP | stat.S_IWOTH)
            content = file.read(limit_bytes + 1)
    finally:
        os.close(folder)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def _require_owner(descriptor: int, path: Path, *, of_others: int = 0) -> None:
    """Refuse an open file or folder of another user, or with these permissions."""
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "another user owns it", str(path))
    if found.st_mode & of_others:
        raise PermissionError(errno.EPERM, "other users can change it", str(path))
