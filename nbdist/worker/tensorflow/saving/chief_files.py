"""Server on rank 0 for the files and saves that other ranks request.

Rank 0 serves from a separate thread, so it responds while its main thread computes or waits. The
server never waits for a rank that sends a request. CURVE encrypts the socket. nbdist derives the
socket's key from the key of the notebook's stream, known only to the notebook and its ranks. A
client needs the socket's public key to connect.
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
from nbdist.worker.tensorflow.runtime.collective_wait import WaitClock
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
    """Answer the other ranks from a thread on rank 0 until the process ends.

    Args:
        worker: worker of rank 0.
        ledger: saves of rank 0.
        key: secret CURVE key of the socket.
        host: address that the other ranks connect to.

    Attributes:
        port: port of the socket.
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
            except OSError as error:  # the file has changed: the rank asks again
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
            return Answer(status="failed", error=f"{path} is not a file of a save")
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
            return Answer(status="failed", error=f"{question.folder} is not a folder of a save")
        number, marker = tempfile.mkstemp(prefix=".nbdist-", dir=question.folder)
        os.close(number)
        self._markers.add(marker)
        return Answer(data=Path(marker).name.encode())

    def _offer(self, answer: Answer) -> Answer:
        self._folders.add(answer.folder)
        self._offered.update(str(Path(answer.folder, facts.name)) for facts in answer.files)
        return answer


class Chief:
    """Client of rank 0's server, used by every other rank.

    Args:
        url: URL of rank 0's socket.
        key: secret CURVE key, the same as on rank 0.
    """

    def __init__(self, url: str, key: bytes) -> None:
        self._url = url
        self._key = key
        self._shared: dict[tuple[str, Path], bool] = {}

    def ask(self, question: Question) -> Answer:
        """Send a question and wait for its answer. An interrupt ends the wait."""
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
        """Copy the files of an answer that differ from the local ones.

        Skip a file that rank 0 has removed since. Copy the current version of a file that rank 0
        has saved again.

        Args:
            found: answer that lists the files.
            folder: local folder that corresponds to rank 0's.

        Returns:
            True if `folder` is not the same folder as rank 0's, so that files had to be copied.

        Raises:
            AnotherRankError: rank 0 cannot read a file.
        """
        if not found.folder or self._is_shared(found.folder, folder):
            return False
        for facts in found.files:
            self._bring_one(found.folder, facts, folder)
        return True

    def _is_shared(self, theirs: str, folder: Path) -> bool:
        """Return True if a marker file that rank 0 creates in its folder is visible in `folder`."""
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
        """Copy one consistent version of a file. Returns False if rank 0 has removed it."""
        with draft.open("wb") as file:
            while file.tell() < facts.size:
                answer = self._read(AskBytes(folder=theirs, facts=facts, offset=file.tell()))
                if answer.status == "alone":
                    return False
                if answer.files:  # rank 0 has saved it again: restart the copy
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
    """Return an answer with the files of a path on this rank.

    Args:
        path: path as the user typed it.
        known: value of `Answer.known`.
        suffix: value of `Answer.suffix`. The listed files belong to the path with this suffix.
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
    """Derive the secret key of rank 0's socket from the key of the notebook's stream."""
    secret = hashlib.blake2b(stream_key, digest_size=_KEY_BYTES, person=b"nbdist-files").digest()
    return z85.encode(secret)


def digest(path: Path) -> bytes:
    """Return the BLAKE2b digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def _part(path: Path, question: AskBytes) -> Answer:
    """Read a part of a file. Returns only the new facts if the file has changed."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        facts = FileFacts(question.facts.name, found.st_size, found.st_mtime_ns, found.st_ino)
        if facts != question.facts:
            return Answer(files=(facts,))
        file.seek(question.offset)
        return Answer(data=file.read(CHUNK_BYTES))


def _parts(path: Path) -> Iterator[Path]:
    """Find the companion files of a saved file: Keras weight shards or OpenVINO weights."""
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
