"""Saves under the mirrored strategy: rank 0 writes, the others wait until its file is complete.

Each rank runs the saving function, because it may contain collectives. Rank 0 writes to the path
that the user typed. Another rank writes to a temporary folder, asks rank 0 for its save of the same
path (`worker/tensorflow/saving/chief_files.py`) and removes the folder. A rank that does not see
rank 0's files at the path copies them there. Rank 0 never waits, so a save on rank 0 alone needs
nobody. A rank whose save rank 0 does not make keeps its own: rank 0 typed another path, has ended
the cell, or waits in a collective.
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
    """The saves of this rank.

    Args:
        chief: rank 0, as this rank asks it; None on rank 0.
        ledger: of rank 0's saves; used on rank 0 alone.
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
        """Whether this is rank 0."""
        return self._chief is None

    def applies(self, path: object) -> bool:
        """Whether a save or a load of `path` is one of all ranks, and not part of another."""
        return (
            isinstance(path, (str, Path))
            and not self._busy
            and threading.current_thread() is threading.main_thread()
            and context.cell_strategy() is not None
            and not any(str(path).startswith(scratch) for scratch in self._scratch)
        )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it, saves are parts of the one that has begun, and variables are not broadcast."""
        self._busy = True
        try:
            with local_variables():
                yield
        finally:
            self._busy = False

    @contextlib.contextmanager
    def announced(self, path: str) -> Iterator[Entry]:
        """On rank 0: a save of `path`; the others wait for the body's end."""
        with self._ledger.saving(context.current().cell, path) as entry:
            yield entry
            if entry.answer.status == "pending":
                entry.answer = Answer() if _REMOTE in path else answer_of(path)

    def scratch(self) -> Path:
        """A folder for what this rank writes in vain; it is removed with the cell at the latest."""
        folder = tempfile.mkdtemp(prefix="nbdist-save-")
        self._scratch.add(folder)
        context.current().ending.callback(self.discard, Path(folder))
        return Path(folder)

    @contextlib.contextmanager
    def drafting(self, path: str) -> Iterator[Path]:
        """Within it, there is such a folder for a save of `path`.

        A save that fails before this rank asks rank 0 for it counts: it fails on rank 0, too.
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
        """Wait for rank 0's save of `path`, and keep this rank's files if rank 0 writes none.

        Args:
            path: as the user typed it.
            scratch: contains this rank's files.
            folder: where they are kept; that of `path` if left out.
        """
        answer = self.await_chief(path)
        if answer.status == "alone":
            move(scratch, folder or Path(path).absolute().parent)
        return answer

    def discard(self, scratch: Path) -> None:
        """Remove such a folder."""
        shutil.rmtree(scratch, ignore_errors=True)
        self._scratch.discard(str(scratch))

    def await_chief(self, path: str) -> Answer:
        """On another rank: wait until rank 0 has saved `path`; copy what is not seen here.

        Returns:
            The answer; its status is `done` or `alone`. Its `known` tells that this rank does
            not see rank 0's files.

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
        """Saves of `path` in this cell, after so many more."""
        cell = context.current().cell
        if cell != self._cell:
            self._cell = cell
            self._counts.clear()
        self._counts[path] += more
        return self._counts[path]

    def see(self, path: object, *, always: bool = False) -> None:
        """Before a load: copy rank 0's files if rank 0 saved them, or nothing is here.

        Args:
            path: a file, a folder, or what the names of files begin with.
            always: also if rank 0's process has not saved them.
        """
        chief = self._chief
        if chief is None or not self.applies(path) or _REMOTE in str(path):
            return
        found = _until_settled(lambda: chief.ask(AskPath(str(path))))
        if found.known or always or not answer_of(str(path)).files:
            chief.bring(found, Path(str(path)).absolute().parent)

    def one_path(self, typed: str, write: Callable[[str], Any], *, swapped: bool = False) -> Any:
        """Save to one path, which is one of all ranks (`of_all`).

        Args:
            typed: the path, as the user typed it.
            write: saves to the path that it is given.
            swapped: it is one file, which rank 0 writes beside the path and renames.
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
    """Move all that is in `scratch` into `folder`, over what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        if path.is_dir():
            move(path, folder / path.name)
        else:
            beside = folder / f".{path.name}.nbdist"
            shutil.copyfile(path, beside)
            beside.replace(folder / path.name)


def _swapped(path: str, write: Callable[[str], Any]) -> Any:
    """Write a file beside its path, and rename it: a rank that reads the former one still can."""
    target = Path(path)
    if _REMOTE in path or target.is_symlink() or target.is_dir():
        return write(path)
    try:
        beside = tempfile.TemporaryDirectory(prefix=".nbdist-", dir=target.parent)
    except OSError:  # a folder that is missing or read-only: the write says so
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
    """On rank 0: answer the other ranks from now on.

    Args:
        host: the address that they connect to.
        stream_key: the key of the notebook's stream.

    Returns:
        The port.
    """
    if not _servers:
        _servers.append(ChiefServer(context.current(), _LEDGER, key_of(stream_key), host))
    return _servers[0].port


def connect(host: str, port: int, stream_key: bytes) -> None:
    """Use rank 0's server, which listens on that port."""
    chief = (
        None if context.current().rank == 0 else Chief(f"tcp://{host}:{port}", key_of(stream_key))
    )
    _saves[:] = [Saves(chief, _LEDGER)]


def current() -> Saves | None:
    """The saves of this rank; None before `connect` and in a process that is no rank."""
    return _saves[0] if _saves else None


def of_all(path: object) -> Saves | None:
    """The saves of this rank, if a save or a load of `path` is one of all ranks."""
    own = current()
    return own if own is not None and own.applies(path) else None


def by_chief(
    write: Callable[..., Any], is_one_file: Callable[..., bool] = lambda *_, **__: False
) -> Callable[..., Any]:
    """Have rank 0 write for all ranks.

    Args:
        write: the function of a library, of an object, a path and more.
        is_one_file: of the path and the further arguments: rank 0 writes beside the path and
            renames.
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
    """Have the files of a path copied from rank 0 before a function of a library reads them.

    Args:
        read: the function.
        place: of the path among its arguments.
        name: of that argument.
    """

    @functools.wraps(read)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        own = current()
        if own is not None:
            own.see(args[place] if len(args) > place else kwargs.get(name))
        return read(*args, **kwargs)

    return wrapped
