"""Histograms, images, tables and texts of a run.

media/
    index.jsonl         a `MediaEntry` a line, appended
    content.bin         contents as JSON, appended; images in base64
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from nbdist.records import AnyMedia, MediaEntry, media_kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import Media

INDEX_FILE, CONTENT_FILE = "index.jsonl", "content.bin"

_SHARED = 256
"""Number of last contents that are compared: ranks often report equal ones."""


class MediaFiles:
    """Writer of the media of one run. A disk error ends them but is not raised.

    Args:
        folder: folder of the files, created with the first content.
        most_bytes: limit of both files together. Later contents are not stored.

    Attributes:
        fault: reason why the files end early, empty if they are complete.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.fault = ""
        self._folder = folder
        self._most_bytes = most_bytes
        self._places: dict[bytes, tuple[int, int]] = {}
        self._sizes: dict[str, int] = {}
        self._count = 0

    def take(self, media: Media) -> bool:
        """Store a content. Returns False if it was not stored."""
        if self.fault:
            return False
        try:
            self._open()
            return self._store(media)
        except OSError as error:
            self.fault = f"the histograms, images, tables and texts end early: {error}"
            return False

    def _open(self) -> None:
        """Create the files. Continue those of another process, up to their last complete line."""
        if self._sizes:
            return
        self._folder.mkdir(exist_ok=True)  # without its parent, to not recreate a deleted run
        index = self._folder / INDEX_FILE
        entries = tuple(read_index(self._folder))
        size = sum(len(_line(entry)) for entry in entries)
        with index.open("ab") as file:
            file.truncate(size)
        content = self._folder / CONTENT_FILE
        content.touch()
        self._count = len(entries)
        self._sizes = {INDEX_FILE: size, CONTENT_FILE: content.stat().st_size}

    def _store(self, media: Media) -> bool:
        content = msgspec.json.encode(media.content)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        offset, size = self._places.get(digest, (self._sizes[CONTENT_FILE], len(content)))
        line = _line(
            MediaEntry(
                number=self._count,
                kind=media_kind(media.content),
                name=media.name,
                rank=media.rank,
                epoch=media.epoch,
                step=media.step,
                time_s=media.time_s,
                offset=offset,
                size=size,
            )
        )
        is_new = digest not in self._places
        added = len(line) + (len(content) if is_new else 0)
        if sum(self._sizes.values()) + added > self._most_bytes:
            self.fault = (
                f"histograms, images, tables and texts after step {media.step} are not stored: "
                f"a run has at most {self._most_bytes:,} bytes of them (NBDIST_MEDIA_BYTES)"
            )
            return False
        if is_new:
            self._append(CONTENT_FILE, content)
            self._share(digest, (offset, size))
        self._append(INDEX_FILE, line)
        self._count += 1
        return True

    def _share(self, digest: bytes, place: tuple[int, int]) -> None:
        self._places[digest] = place
        if len(self._places) > _SHARED:
            del self._places[next(iter(self._places))]

    def _append(self, name: str, content: bytes) -> None:
        with (self._folder / name).open("ab", buffering=0) as file:
            written = file.write(content)
        if written < len(content):
            raise OSError("the disk is full")
        self._sizes[name] += written


class MediaIndex:
    """Incremental reader of the index of one run.

    Args:
        folder: folder of the files. It may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def news(self, most_bytes: int) -> tuple[MediaEntry, ...]:
        """Return the next entries, empty if there are none. An incomplete line waits.

        Args:
            most_bytes: largest number of bytes to read.
        """
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = (self._folder / INDEX_FILE).open("rb")
        if self._file is None:
            return ()
        begin = self._file.tell()
        whole = self._file.read(most_bytes)
        whole = whole[: whole.rfind(b"\n") + 1]
        self._file.seek(begin + len(whole))
        return tuple(msgspec.json.decode(line, type=MediaEntry) for line in whole.splitlines())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_index(folder: Path) -> Iterator[MediaEntry]:
    """Yield the entries of a run, in order of their arrival."""
    with contextlib.closing(MediaIndex(folder)) as index:
        while entries := index.news(1 << 20):
            yield from entries


def read_content(folder: Path, entry: MediaEntry) -> bytes:
    """Return a content as JSON."""
    with (folder / CONTENT_FILE).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.size)


def decode_content(content: bytes) -> AnyMedia:
    """Decode the JSON of a content."""
    decoded: AnyMedia = msgspec.json.decode(content, type=AnyMedia)
    return decoded


def _line(entry: MediaEntry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
