"""Questions about the files and saves of rank 0, and the answers to them."""

from __future__ import annotations

from typing import Literal

import msgspec


class FileFacts(msgspec.Struct, frozen=True):
    """Facts of a file. `name` is relative to the folder of a saved path."""

    name: str
    size: int
    mtime_ns: int
    inode: int


class AskSave(msgspec.Struct, frozen=True, tag=True):
    """Ask for save number `count` of `path` in a cell. `path` is as rank `rank` typed it."""

    cell: int
    rank: int
    path: str
    count: int


class AskPath(msgspec.Struct, frozen=True, tag=True):
    """Ask for the files of a path: a file, all files of a folder, or files named `path.*`."""

    path: str


class AskDigest(msgspec.Struct, frozen=True, tag=True):
    """Ask for the digest of a file."""

    folder: str
    name: str


class AskBytes(msgspec.Struct, frozen=True, tag=True):
    """Ask for a part of a file if its facts have not changed."""

    folder: str
    facts: FileFacts
    offset: int


class AskMarker(msgspec.Struct, frozen=True, tag=True):
    """Ask rank 0 to create a file in a folder of a save, to test whether it is visible here.

    Attributes:
        folder: folder on rank 0.
        remove: name of an earlier marker to remove. Empty to request a new one.
    """

    folder: str
    remove: str = ""


Question = AskMarker | AskSave | AskPath | AskDigest | AskBytes
SaveStatus = Literal["pending", "done", "failed", "alone"]


class Answer(msgspec.Struct, frozen=True):
    """Answer of rank 0.

    Attributes:
        status: state of the save. `alone` if rank 0 does not save the path, or cannot do so before
            this rank continues. For a file, `alone` if rank 0 has removed it.
        error: error of rank 0 if the status is `failed`.
        suffix: end of the saved path that follows the requested path.
        folder: folder on rank 0 that file names are relative to.
        files: files of the path. Empty if the path does not exist.
        known: True if rank 0 has saved the path since its process started.
        data: a digest, a part of a file, or the name of a marker.
    """

    status: SaveStatus = "done"
    error: str = ""
    suffix: str = ""
    folder: str = ""
    files: tuple[FileFacts, ...] = ()
    known: bool = False
    data: bytes = b""
