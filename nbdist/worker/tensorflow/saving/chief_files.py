"""Rank 0's files and saves, as the other ranks ask for them.

Rank 0 serves on a thread of its own, so that it answers while its main thread computes or waits.
It never waits for a rank that asks. The socket is encrypted with CURVE. Its key is derived from the
key of the notebook's stream, which only the notebook and its ranks know. Only who knows the
socket's public key can connect.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils import z85

from nbdist.errors import AnotherRankError
from nbdist.worker.tensorflow.collective_wait import WaitClock
from nbdist.worker.tensorflow.saving.messages import (
    Answer,
    AskBytes,
    AskDigest,
    AskMarker,
    AskPath,
    AskSave,
    FileFacts,
    Question,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.tensorflow.saving.ledger import SaveLedger

CHUNK_BYTES = 4 << 20
_POLL_MS = 50
_KEY_BYTES = 32


class ChiefServer:
    """Answers the other ranks from a thread; runs on rank 0 until the process ends.

    Args:
        worker: rank 0.
        ledger: its saves.
        key: of the socket, a secret CURVE key.
        host: the address that the other ranks connect to.

    Attributes:
        port: the socket's.
    """

    def __init__(self, worker: Worker, ledger: SaveLedger, key: bytes, host: str) -> None:
        self._ledger = ledger
        self._worker = worker
        self._clock = WaitClock(threading.main_thread().ident or 0)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        socket.setsockopt(zmq.IPV6, 1)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = key, zmq.curve_public(key)
        where = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "*"
        self.port: int = socket.bind_to_random_port(f"tcp://{where}")
        self._offered: set[str] = set()
        self._folders: set[str] = set()
        self._markers: set[str] = set()
        threading.Thread(
            target=self._serve, args=(socket,), name="nbdist-files", daemon=True
        ).start()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            question = msgspec.msgpack.decode(socket.recv(), type=Question)
            try:
                answer = self._answer(question)
            except OSError as error:  # a file that changed meanwhile: the rank asks again
                answer = Answer(status="failed", error=str(error))
            socket.send(msgspec.msgpack.encode(answer))

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, AskSave):
            return self._offer(self._ledger.answer(question, self._worker, self._clock))
        if isinstance(question, AskPath):
            answer = self._ledger.in_progress(question.path)
            return answer or self._offer(
                answer_of(question.path, known=self._ledger.knows(question.path))
            )
        if isinstance(question, AskMarker):
            return self._mark(question)
        name = question.name if isinstance(question, AskDigest) else question.facts.name
        path = Path(question.folder, name)
        if str(path) not in self._offered:
            return Answer(status="failed", error=f"{path} is no file of a save")
        if not path.is_file():
            return Answer(status="alone")
        if isinstance(question, AskDigest):
            return Answer(data=digest(path))
        return _part(path, question)

    def _mark(self, question: AskMarker) -> Answer:
        if question.remove:
            path = Path(question.folder, question.remove)
            if str(path) in self._markers:
                self._markers.discard(str(path))
                path.unlink(missing_ok=True)
            return Answer()
        if question.folder not in self._folders:
            return Answer(status="failed", error=f"{question.folder} is no folder of a save")
        number, marker = tempfile.mkstemp(prefix=".nbdist-", dir=question.folder)
        os.close(number)
        self._markers.add(marker)
        return Answer(data=Path(marker).name.encode())

    def _offer(self, answer: Answer) -> Answer:
        self._folders.add(answer.folder)
        self._offered.update(str(Path(answer.folder, facts.name)) for facts in answer.files)
        return answer


class Chief:
    """Rank 0 as another rank asks it.

    Args:
        url: rank 0's socket.
        key: as rank 0's.
    """

    def __init__(self, url: str, key: bytes) -> None:
        self._url = url
        self._key = key
        self._shared: dict[tuple[str, Path], bool] = {}

    def ask(self, question: Question) -> Answer:
        """Wait for the answer; an interrupt gets through."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        with socket:
            socket.setsockopt(zmq.IPV6, 1)
            socket.linger = 0
            socket.curve_serverkey = zmq.curve_public(self._key)
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.connect(self._url)
            socket.send(msgspec.msgpack.encode(question))
            while not socket.poll(_POLL_MS):
                pass
            return msgspec.msgpack.decode(socket.recv(), type=Answer)

    def bring(self, found: Answer, folder: Path) -> bool:
        """Copy the files of an answer that differ here from rank 0's.

        Args:
            found: names them.
            folder: here, in the place of rank 0's.

        A file that rank 0 has removed since is left out, and one that it has saved anew is copied
        as it is now.

        Returns:
            True if this rank does not see rank 0's files in `folder`.

        Raises:
            AnotherRankError: rank 0 cannot read a file.
        """
        if not found.folder or self._is_shared(found.folder, folder):
            return False
        for facts in found.files:
            self._bring_one(found.folder, facts, folder)
        return True

    def _is_shared(self, theirs: str, folder: Path) -> bool:
        """Whether rank 0's folder is the one here: a file that rank 0 makes is in sight."""
        if (theirs, folder) not in self._shared:
            answer = self.ask(AskMarker(theirs))
            marker = answer.data.decode()
            self._shared[theirs, folder] = bool(marker) and (folder / marker).is_file()
            if marker:
                self.ask(AskMarker(theirs, remove=marker))
        return self._shared[theirs, folder]

    def _bring_one(self, theirs: str, facts: FileFacts, folder: Path) -> None:
        path = folder / facts.name
        if self._is_same(theirs, facts, path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if self._copy(theirs, facts, draft):
                draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _is_same(self, theirs: str, facts: FileFacts, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != facts.size:
            return False
        return self._read(AskDigest(folder=theirs, name=facts.name)).data == digest(path)

    def _copy(self, theirs: str, facts: FileFacts, draft: Path) -> bool:
        """Copy a file as it is at one moment; returns False if rank 0 has removed it."""
        with draft.open("wb") as file:
            while file.tell() < facts.size:
                answer = self._read(AskBytes(folder=theirs, facts=facts, offset=file.tell()))
                if answer.status == "alone":
                    return False
                if answer.files:  # it was saved anew
                    (facts,) = answer.files
                    file.seek(0)
                    file.truncate()
                file.write(answer.data)
        return True

    def _read(self, question: AskDigest | AskBytes) -> Answer:
        answer = self.ask(question)
        if answer.status == "failed":
            raise AnotherRankError(f"rank 0 cannot read its file: {answer.error}")
        return answer


def answer_of(
    path: str, *, known: bool = True, suffix: str = "", more: Iterable[str] = ()
) -> Answer:
    """The files of a path on this rank.

    Args:
        path: as it was typed.
        known: as in `Answer`.
        suffix: likewise; the files are those of the path with it.
        more: names of further files in the path's folder.
    """
    whole = Path(f"{path}{suffix}").absolute()
    if whole.is_file():
        found = [whole, *_parts(whole)]
    elif whole.is_dir():
        found = [each for each in whole.rglob("*") if each.is_file()]
    else:
        found = [*whole.parent.glob(f"{glob.escape(whole.name)}.*")]
    found += [whole.parent / name for name in more if (whole.parent / name).is_file()]
    facts = tuple(_facts(each, whole.parent) for each in sorted({*found}))
    return Answer(folder=str(whole.parent), files=facts, known=known, suffix=suffix)


def key_of(stream_key: bytes) -> bytes:
    """The secret key of rank 0's socket, from the key of the notebook's stream."""
    secret = hashlib.blake2b(stream_key, digest_size=_KEY_BYTES, person=b"nbdist-files").digest()
    return z85.encode(secret)


def digest(path: Path) -> bytes:
    """A digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def _part(path: Path, question: AskBytes) -> Answer:
    """A part of a file; the file's facts and no part if it is another one by now."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        facts = FileFacts(question.facts.name, found.st_size, found.st_mtime_ns, found.st_ino)
        if facts != question.facts:
            return Answer(files=(facts,))
        file.seek(question.offset)
        return Answer(data=file.read(CHUNK_BYTES))


def _parts(path: Path) -> Iterator[Path]:
    """Further files of a saved file: shards of Keras weights, or weights of an OpenVINO model."""
    if path.suffix == ".xml":
        return path.parent.glob(f"{glob.escape(path.stem)}.bin")
    if not path.name.endswith(".weights.json"):
        return iter(())
    stem = path.name.removesuffix(".weights.json")
    return path.parent.glob(f"{glob.escape(stem)}_*.weights.h5")


def _facts(path: Path, folder: Path) -> FileFacts:
    found = path.stat()
    return FileFacts(
        name=str(path.relative_to(folder)),
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        inode=found.st_ino,
    )
