"""Questions about the files and saves of rank 0, and its answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class FileFacts(msgspec.Struct, frozen=True):
    """A file, by its name relative to the folder of a saved path."""

    name: str
    size: int
    mtime_ns: int
    inode: int


class AskSave(msgspec.Struct, frozen=True, tag=True):
    """Ask for save number `count` of `path` in a cell, as rank `rank` typed the path."""

    cell: int
    rank: int
    path: str
    count: int


class AskPath(msgspec.Struct, frozen=True, tag=True):
    """Ask for the files of a path: a file, a folder's, or those that begin with it and a dot."""

    path: str


class AskDigest(msgspec.Struct, frozen=True, tag=True):
    """Ask for a file's digest."""

    folder: str
    name: str


class AskBytes(msgspec.Struct, frozen=True, tag=True):
    """Ask for a part of a file, if it is still the one of these facts."""

    folder: str
    facts: FileFacts
    offset: int


class AskMarker(msgspec.Struct, frozen=True, tag=True):
    """Ask for a file of a new name in a folder of a save, to see whether it is visible here.

    Attributes:
        folder: rank 0's.
        remove: a marker that was asked for before; empty to ask for one.
    """

    folder: str
    remove: str = ""


Question = AskMarker | AskSave | AskPath | AskDigest | AskBytes
SaveStatus = Literal["pending", "done", "failed", "alone"]


class Answer(msgspec.Struct, frozen=True):
    """An answer of rank 0.

    Attributes:
        status: of the save; `alone` if rank 0 does not save the path, or cannot before this rank
            continues; of a file, `alone` if rank 0 has removed it.
        error: rank 0's, if it failed.
        suffix: the end of the saved path, beyond the one that was asked for.
        folder: on rank 0, to which the names of files are relative.
        files: files of the path; empty if nothing is there.
        known: whether rank 0 has saved the path since its process started.
        data: a digest, a part of a file, or the name of a marker.
    """

    status: SaveStatus = "done"
    error: str = ""
    suffix: str = ""
    folder: str = ""
    files: tuple[FileFacts, ...] = ()
    known: bool = False
    data: bytes = b""
