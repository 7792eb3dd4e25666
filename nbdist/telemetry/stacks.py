"""Stacks of the ranks during a run, and the requests of browsers for them.

stacks/
    requests            ranks, one a line, appended
    rank-<N>.json       the last `WorkerStack` of a rank, replaced as a whole
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import WorkerStack
from nbdist.utils.files import replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import RankPosition


class StackFiles:
    """Files of one run.

    Args:
        folder: folder of the files, created when necessary.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests = folder / "requests"
        self._answered = self._size()

    def request(self, rank: int) -> None:
        """Ask the kernel for the stack of a rank. Raises OSError if the run was deleted."""
        self._folder.mkdir(exist_ok=True)  # without its parent, to not recreate a deleted run
        with self._requests.open("ab") as file:
            file.write(f"{rank}\n".encode())

    def take_requests(self) -> set[int]:
        """Return the ranks that were requested since the last call."""
        size = self._size()
        if size == self._answered:
            return set()
        with self._requests.open("rb") as file:
            file.seek(self._answered)
            lines = file.read(size - self._answered)
        self._answered = size
        return {int(line) for line in lines.split() if line.isdigit()}

    def store(self, where: RankPosition) -> None:
        """Store the stack of a rank. A full disk loses it."""
        fields = {name: getattr(where, name) for name in WorkerStack.__struct_fields__[1:]}
        stack = WorkerStack(at=time.time(), **fields)
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            replace_file(self._path(where.rank), msgspec.json.encode(stack))

    def read(self, rank: int) -> WorkerStack | None:
        """Return the last stack of a rank. None without a stored or readable stack."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path(rank).read_bytes(), type=WorkerStack)
        return None

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return self._requests.stat().st_size
        return 0
