"""Saves under the mirrored strategy: rank 0 writes, and the others wait for its complete file.

Each rank runs the saving function, because it may contain collectives. Rank 0 writes to the path
that the user typed. Another rank writes to a temporary folder, asks rank 0 for its save of the same
path (`worker/tensorflow/saving/chief_files.py`) and removes the folder. A rank that does not see
rank 0's files at the path copies them there.

Rank 0 never waits, so a save on rank 0 alone needs no other rank. A rank keeps its own files if
rank 0 does not make the same save. Rank 0 may save to another path, have ended the cell, or wait in
a collective.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import AnotherRankError
from nbdist.worker.runtime import context
from nbdist.worker.tensorflow.saving.chief_files import Chief, ChiefServer, answer_of, key_of
from nbdist.worker.tensorflow.saving.ledger import SaveLedger
from nbdist.worker.tensorflow.saving.local_variables import local_variables
from nbdist.worker.tensorflow.saving.messages import Answer, AskPath, AskSave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.tensorflow.saving.ledger import Entry

_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.05
_REMOTE = "://"


class Saves:
    """Saves of this rank.

    Args:
        chief: client of rank 0's server, or None on rank 0.
        ledger: saves of rank 0, used on rank 0 only.
    """

    def __init__(self, chief: Chief | None, ledger: SaveLedger) -> None:
        self._chief = chief
        self._ledger = ledger
        self._cell = 0
        self._counts: Counter[str] = Counter()
        self._busy = False
        self._scratch: set[str] = set()

    @property
    def is_chief(self) -> bool:
        """Return True on rank 0."""
        return self._chief is None

    def applies(self, path: object) -> bool:
        """Return True if all ranks coordinate a save or load of `path`, outside of another save."""
        return (
            isinstance(path, (str, Path))
            and not self._busy
            and threading.current_thread() is threading.main_thread()
            and context.cell_strategy() is not None
            and not any(str(path).startswith(scratch) for scratch in self._scratch)
        )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Treat nested saves as parts of the current one, and do not broadcast new variables."""
        self._busy = True
        try:
            with local_variables():
                yield
        finally:
            self._busy = False

    @contextlib.contextmanager
    def announced(self, path: str) -> Iterator[Entry]:
        """Announce a save of `path` on rank 0. The other ranks wait until the body ends."""
        with self._ledger.saving(context.current().cell, path) as entry:
            yield entry
            if entry.answer.status == "pending":
                entry.answer = Answer() if _REMOTE in path else answer_of(path)

    def scratch(self) -> Path:
        """Create a temporary folder for discarded files. nbdist removes it when the cell ends."""
        folder = tempfile.mkdtemp(prefix="nbdist-save-")
        self._scratch.add(folder)
        context.current().ending.callback(self.discard, Path(folder))
        return Path(folder)

    @contextlib.contextmanager
    def drafting(self, path: str) -> Iterator[Path]:
        """Provide a temporary folder for a save of `path` and remove it afterwards.

        A save that fails before this rank asks rank 0 for it is still counted, because it fails on
        rank 0 too.
        """
        scratch, before = self.scratch(), self._count(path, 0)
        is_whole = False
        try:
            yield scratch
            is_whole = True
        finally:
            self.discard(scratch)
            if not is_whole and self._count(path, 0) == before:
                self._count(path, 1)

    def settle(self, path: str, scratch: Path, folder: Path | None = None) -> Answer:
        """Wait for rank 0's save of `path`. Keep this rank's files if rank 0 writes none.

        Args:
            path: path as the user typed it.
            scratch: temporary folder with this rank's files.
            folder: destination of this rank's files (default: the folder of `path`).
        """
        answer = self.await_chief(path)
        if answer.status == "alone":
            move(scratch, folder or Path(path).absolute().parent)
        return answer

    def discard(self, scratch: Path) -> None:
        """Remove a temporary folder."""
        shutil.rmtree(scratch, ignore_errors=True)
        self._scratch.discard(str(scratch))

    def await_chief(self, path: str) -> Answer:
        """Wait on another rank until rank 0 has saved `path`. Copy files that are not visible here.

        Returns:
            The answer with status `done` or `alone`. `known` is True if this rank does not see rank
            0's files.

        Raises:
            AnotherRankError: rank 0 could not save.
        """
        worker, chief = context.current(), self._chief
        assert chief is not None
        asked = AskSave(worker.cell, worker.rank, path, self._count(path, 1))
        answer = _until_settled(lambda: chief.ask(asked))
        if answer.status == "failed":
            raise AnotherRankError(f"rank 0 could not save {path}: {answer.error}")
        apart = chief.bring(answer, Path(path).absolute().parent)
        return Answer(answer.status, suffix=answer.suffix, known=apart)

    def _count(self, path: str, more: int) -> int:
        """Add `more` to the number of saves of `path` in this cell and return the sum."""
        cell = context.current().cell
        if cell != self._cell:
            self._cell = cell
            self._counts.clear()
        self._counts[path] += more
        return self._counts[path]

    def see(self, path: object, *, always: bool = False) -> None:
        """Copy rank 0's files before a load if rank 0 saved them or this rank has none.

        Args:
            path: a file, a folder, or a prefix of file names.
            always: copy them even if rank 0's process has not saved them.
        """
        chief = self._chief
        if chief is None or not self.applies(path) or _REMOTE in str(path):
            return
        found = _until_settled(lambda: chief.ask(AskPath(str(path))))
        if found.known or always or not answer_of(str(path)).files:
            chief.bring(found, Path(str(path)).absolute().parent)

    def one_path(self, typed: str, write: Callable[[str], Any], *, swapped: bool = False) -> Any:
        """Save to a path that all ranks share (see `of_all`).

        Args:
            typed: path as the user typed it.
            write: function that saves to the path it receives.
            swapped: the path is one file. Rank 0 writes it to a temporary folder beside the path
                and then renames it.
        """
        with self.whole():
            if self.is_chief:
                with self.announced(typed):
                    return _swapped(typed, write) if swapped else write(typed)
            with self.drafting(typed) as scratch:
                result = write(str(scratch / Path(typed).name))
                self.settle(typed, scratch)
                return result


def move(scratch: Path, folder: Path) -> None:
    """Move all files of `scratch` into `folder` and overwrite existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        if path.is_dir():
            move(path, folder / path.name)
        else:
            beside = folder / f".{path.name}.nbdist"
            shutil.copyfile(path, beside)
            beside.replace(folder / path.name)


def _swapped(path: str, write: Callable[[str], Any]) -> Any:
    """Write a file beside its path and rename it, so that a rank can finish reading the old one."""
    target = Path(path)
    if _REMOTE in path or target.is_symlink() or target.is_dir():
        return write(path)
    try:
        beside = tempfile.TemporaryDirectory(prefix=".nbdist-", dir=target.parent)
    except OSError:  # the folder is missing or read-only: `write` reports it
        return write(path)
    with beside as folder:
        draft = Path(folder) / target.name
        result = write(str(draft))
        draft.replace(target)
    return result


def _until_settled(ask: Callable[[], Answer]) -> Answer:
    pause_s = _FIRST_POLL_S
    while (answer := ask()).status == "pending":
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
    return answer


_LEDGER = SaveLedger()
_servers: list[ChiefServer] = []
_saves: list[Saves] = []


def serve(host: str, stream_key: bytes) -> int:
    """Start rank 0's server for the other ranks, if it does not run yet.

    Args:
        host: address that the other ranks connect to.
        stream_key: key of the notebook's stream.

    Returns:
        The port.
    """
    if not _servers:
        _servers.append(ChiefServer(context.current(), _LEDGER, key_of(stream_key), host))
    return _servers[0].port


def connect(host: str, port: int, stream_key: bytes) -> None:
    """Connect this rank to the server of rank 0 on `host` and `port`."""
    chief = (
        None if context.current().rank == 0 else Chief(f"tcp://{host}:{port}", key_of(stream_key))
    )
    _saves[:] = [Saves(chief, _LEDGER)]


def current() -> Saves | None:
    """Return the saves of this rank. None before `connect` and in a process that is not a rank."""
    return _saves[0] if _saves else None


def of_all(path: object) -> Saves | None:
    """Return the saves of this rank if all ranks coordinate a save or load of `path`, else None."""
    own = current()
    return own if own is not None and own.applies(path) else None


def by_chief(
    write: Callable[..., Any], is_one_file: Callable[..., bool] = lambda *_, **__: False
) -> Callable[..., Any]:
    """Wrap a saving function so that rank 0 writes for all ranks.

    Args:
        write: library function that takes an object, a path and further arguments.
        is_one_file: takes the path and the further arguments. Returns True if rank 0 should write
            beside the path and rename.
    """

    @functools.wraps(write)
    def wrapped(saved: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        own = of_all(filepath)
        if own is None:
            return write(saved, filepath, *args, **kwargs)
        typed = str(filepath)
        return own.one_path(
            typed,
            lambda path: write(saved, path, *args, **kwargs),
            swapped=is_one_file(typed, *args, **kwargs),
        )

    return wrapped


def seen(read: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
    """Wrap a reading function so that the files of its path are copied from rank 0 first.

    Args:
        read: library function.
        place: position of the path among its arguments.
        name: name of that argument.
    """

    @functools.wraps(read)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        own = current()
        if own is not None:
            own.see(args[place] if len(args) > place else kwargs.get(name))
        return read(*args, **kwargs)

    return wrapped
