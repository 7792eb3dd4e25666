"""What a cell writes and displays on an engine, turned into records."""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import re
import secrets
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel.iostream import OutStream
from IPython.core.displaypub import DisplayPublisher

from nbdist.records import Display, MimeBundle, Output, StreamName

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import AnyEvent

_SETTLE_S = 1.0
_LOG_INTERVAL_S = 0.2


class RankStream(io.TextIOBase):
    """Standard output or error of a rank: every write becomes a record at once."""

    def __init__(
        self,
        stream: StreamName,
        said: Callable[[], dict[str, Any]],
        say: Callable[[AnyEvent], None],
    ) -> None:
        self._stream: StreamName = stream
        self._said = said
        self._say = say

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        """The descriptor that child processes are to write to."""
        return 1 if self._stream == "stdout" else 2

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() takes str, not {type(text).__name__}")
        if text:
            self._say(Output(stream=self._stream, text=text, **self._said()))
        return len(text)


class EngineStream(OutStream):  # type: ignore[misc]
    """ipykernel's stream for an engine that has no rank yet, leaving the file descriptors alone."""

    def __init__(self, session: Any, pub_thread: Any, name: str) -> None:
        super().__init__(session, pub_thread, name, watchfd=False)


_GREETS = b"[Gloo] Rank "
_WORDS = (b" is connected to ", b" peer ranks. ", b"Expected number of connected peer ranks is : ")
_NUMBERS = 3
"""What gloo says whenever devices meet that have not met before; numbers are between."""

_WORD = re.compile(b"|".join(map(re.escape, (_GREETS, *_WORDS))))
_PART = re.compile(_WORD.pattern + rb"|\n|\d+")
_OTHER = re.compile(b"(?:(?!" + _WORD.pattern + rb").)*\n?")


class Ungreeted:
    """What was written, without gloo's greetings.

    Each thread writes its own in parts, and parts of several come mixed.
    """

    def __init__(self) -> None:
        self._kept = b""
        self._awaited: Counter[bytes] = Counter()
        self._amid = False  # in a line that is none of gloo's

    def feed(self, data: bytes, *, ends: bool) -> bytes:
        """What may be shown by now: what may be part of a greeting waits for its end.

        Args:
            data: written since the last time.
            ends: nothing is to wait.
        """
        text, shown = self._kept + data, b""
        self._kept = b""
        while text and not self._kept:
            if not self._awaited.total():
                other, greets, text = text.partition(_GREETS)
                if greets:
                    self._await()
                    shown += other
                    continue
            elif part := (_WORD if self._amid else _PART).match(text):
                text, self._amid = text[part.end() :], False
                other = self._unasked(part[0])
            else:
                begun = _OTHER.match(text)
                assert begun is not None  # of nothing, too
                other, text = begun[0], text[begun.end() :]
                self._amid = not other.endswith(b"\n")
            if not text and not ends:
                words = (_GREETS, *_WORDS) if self._awaited.total() else (_GREETS,)
                splits = [_split_before(other, word) for word in words]
                self._kept, other = max(splits, key=lambda split: len(split[0]))
            shown += other
        if ends:
            self._awaited.clear()
            self._amid = False
        return shown

    def _await(self) -> None:
        for part, times in (*((word, 1) for word in _WORDS), (b"\n", 1), (b"0", _NUMBERS)):
            self._awaited[part] += times

    def _unasked(self, part: bytes) -> bytes:
        """A part, if no greeting that has begun lacks it; numbers of two may be one."""
        if part == _GREETS:
            self._await()
            return b""
        kind = b"0" if part.isdigit() else part
        if not self._awaited[kind]:
            return part
        self._awaited[kind] -= 1
        if not any(self._awaited[word] for word in (*_WORDS, b"\n")):
            self._awaited.clear()
        return b""


class DescriptorTap:
    """Passes on what child processes and C libraries write to descriptor 1.

    Gloo's greetings are left out.

    Args:
        write: gets the text, on a thread of the tap's own.
    """

    def __init__(self, write: Callable[[str], int]) -> None:
        self._write = write
        self._mark = b"\0" + secrets.token_hex(8).encode() + b"\0"
        self._marked = threading.Event()
        self._stdio = ctypes.CDLL(None)
        self._reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        threading.Thread(target=self._pump, name="nbdist-stdout", daemon=True).start()

    def settle(self) -> None:
        """Wait until all that was written so far has been passed on."""
        self._stdio.fflush(None)
        self._marked.clear()
        os.write(1, self._mark)
        self._marked.wait(_SETTLE_S)

    def _pump(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        kept, shown = b"", Ungreeted()
        while chunk := os.read(self._reader, 1 << 16):
            *whole, kept = (kept + chunk).split(self._mark)
            kept, ready = _split_before(kept, self._mark)
            self._write(decode(shown.feed(b"".join(whole) + ready, ends=bool(whole))))
            if whole:
                self._marked.set()


_NATIVE = re.compile(r"[IWE]\d{4} [\d:.]+ ")
_NOISE = re.compile(
    r"I\d{4} [\d:.]+ |WARNING: All log messages before absl::InitializeLog|"
    r"[WE]\d{4} [\d:.]+ +\d+ util\.cc:\d+\] (Not handling type|oneDNN supports DT_)|"
    r"[WE]\d{4} [\d:.]+ +\d+ dataset\.cc:\d+\] Input of Generator|"
    r"[WE]\d{4} [\d:.]+ +\d+ (ring_\w+|base_collective_executor|local_rendezvous)\.cc:|"
    r"Additional GRPC error information from remote target |:UNKNOWN:Error received from peer|"
    r"The error could be from a previous operation\. Restart your program|\t \[\[\{\{node |"
    r"[-\d]+ [\d:.]+ \[IPEngine\.\d+\] WARNING \| No heartbeat"
)


class LogTap:
    """Passes on what is written to descriptor 2, which is the engine's log file.

    The file keeps it: what a process says when it is aborted must not be lost in a pipe that it
    would have to read itself. What TensorFlow's native code says for information, of every float64
    graph, or of collectives that fail (which the error has too that is raised), stays there, and
    what ipyparallel says of a machine that is busy.

    Args:
        write: gets the text.
    """

    def __init__(self, write: Callable[[str], int]) -> None:
        self._write = write
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._log = Path("/proc/self/fd/2").open("rb", buffering=0)  # noqa: SIM115 - for life
        self._log.seek(0, os.SEEK_END)
        self._lock = threading.Lock()
        self._rest = ""
        threading.Thread(target=self._pump, name="nbdist-stderr", daemon=True).start()

    def settle(self) -> None:
        """Pass on all that was written so far."""
        with self._lock:
            while chunk := self._log.read(1 << 16):
                whole, end, rest = (self._rest + self._decode(chunk)).rpartition("\n")
                self._rest = rest if _NATIVE.match(rest) else ""
                lines = (whole + end).splitlines(keepends=True)
                told = "".join(line for line in lines if not _NOISE.match(line))
                if told or not self._rest:
                    self._write(told + rest[len(self._rest) :])

    def _pump(self) -> None:
        while True:
            time.sleep(_LOG_INTERVAL_S)
            self.settle()


def _split_before(data: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Keep back what may be the beginning of `mark`; returns (kept, ready)."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:length]):
            return data[-length:], data[:-length]
    return b"", data


class RankDisplayPublisher(DisplayPublisher):
    """`display(...)` on a rank: a record, not a message to the controller."""

    def __init__(
        self, said: Callable[[], dict[str, Any]], say: Callable[[AnyEvent], None], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._said = said
        self._say = say

    def publish(
        self,
        data: MimeBundle,
        metadata: MimeBundle | None = None,
        source: str | None = None,
        *,
        transient: MimeBundle | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        del source
        display_id = str((transient or {}).get("display_id", ""))
        record = Display(
            data=data, metadata=metadata or {}, display_id=display_id, update=update, **self._said()
        )
        self._say(record)

    def set_parent(self, parent: object) -> None:
        """Ipykernel names the request that runs; a record names the cell instead."""

    def clear_output(self, wait: bool = False) -> None:
        """Other ranks share the output: a rank cannot clear it."""
        del wait
