"""Output and displays of a cell on an engine, converted to records."""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel.iostream import OutStream
from IPython.core.displaypub import DisplayPublisher

from nbdist.records import Display, MimeBundle, Output, StreamName
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.runtime.rank_reporter import RankReporter

_SETTLE_S = 1.0
_LOG_INTERVAL_S = 0.2


class RankStream(io.TextIOBase):
    """Standard output or error of a rank. Each write becomes a record at once."""

    def __init__(self, stream: StreamName, reporter: RankReporter) -> None:
        self._stream: StreamName = stream
        self._reporter = reporter

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        """Return the descriptor for child processes to write to."""
        return 1 if self._stream == "stdout" else 2

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() takes str, not {type(text).__name__}")
        if text:
            self._reporter.send(
                Output(stream=self._stream, text=text, **self._reporter.record_fields())
            )
        return len(text)


class EngineStream(OutStream):  # type: ignore[misc]
    """ipykernel's stream for an engine without a rank; it leaves the file descriptors unchanged."""

    def __init__(self, session: Any, pub_thread: Any, name: str) -> None:
        super().__init__(session, pub_thread, name, watchfd=False)


_GLOO_START = b"[Gloo] Rank "
_WORDS = (b" is connected to ", b" peer ranks. ", b"Expected number of connected peer ranks is : ")
_NUMBERS = 3
"""Message that Gloo prints when devices first connect: these words, with numbers between."""

_WORD = re.compile(b"|".join(map(re.escape, (_GLOO_START, *_WORDS))))
_PART = re.compile(_WORD.pattern + rb"|\n|\d+")
_OTHER = re.compile(b"(?:(?!" + _WORD.pattern + rb").)*\n?")


class GlooMessageFilter:
    """Filter that removes Gloo's connection messages from output.

    Each thread writes its message in parts, so the parts of several threads may be mixed.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._expected: Counter[bytes] = Counter()
        self._is_in_other_line = False  # within a line that is not from Gloo

    def feed(self, data: bytes, *, ends: bool) -> bytes:
        """Return the text to show now; keep back text that may be part of a message.

        Args:
            data: output written since the last call.
            ends: True to keep nothing back.
        """
        text, shown = self._pending + data, b""
        self._pending = b""
        while text and not self._pending:
            if not self._expected.total():
                other, start, text = text.partition(_GLOO_START)
                if start:
                    self._expect_message()
                    shown += other
                    continue
            elif part := (_WORD if self._is_in_other_line else _PART).match(text):
                text, self._is_in_other_line = text[part.end() :], False
                other = self._filtered(part[0])
            else:
                begun = _OTHER.match(text)
                assert begun is not None  # the pattern also matches the empty text
                other, text = begun[0], text[begun.end() :]
                self._is_in_other_line = not other.endswith(b"\n")
            if not text and not ends:
                words = (_GLOO_START, *_WORDS) if self._expected.total() else (_GLOO_START,)
                splits = [_split_before(other, word) for word in words]
                self._pending, other = max(splits, key=lambda split: len(split[0]))
            shown += other
        if ends:
            self._expected.clear()
            self._is_in_other_line = False
        return shown

    def _expect_message(self) -> None:
        for part, times in (*((word, 1) for word in _WORDS), (b"\n", 1), (b"0", _NUMBERS)):
            self._expected[part] += times

    def _filtered(self, part: bytes) -> bytes:
        """Return a part unless a begun message lacks it. Two adjacent numbers may look like one."""
        if part == _GLOO_START:
            self._expect_message()
            return b""
        kind = b"0" if part.isdigit() else part
        if not self._expected[kind]:
            return part
        self._expected[kind] -= 1
        if not any(self._expected[word] for word in (*_WORDS, b"\n")):
            self._expected.clear()
        return b""


class DescriptorTap:
    """Forwards what child processes and C libraries write to descriptor 1.

    Gloo's connection messages are removed.

    Args:
        write: receives the text, on the tap's own thread.
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
        """Wait until all output written so far has been forwarded."""
        self._stdio.fflush(None)
        self._marked.clear()
        os.write(1, self._mark)
        self._marked.wait(_SETTLE_S)

    def _pump(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        kept, shown = b"", GlooMessageFilter()
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
    r"E\d{4} [\d:.]+ +\d+ cpu_aot_loader\.cc:\d+\] Loading .* feature \+prefer-|"
    r"Additional GRPC error information from remote target |:UNKNOWN:Error received from peer|"
    r"The error could be from a previous operation\. Restart your program|\t \[\[\{\{node |"
    r"[-\d]+ [\d:.]+ \[IPEngine\.\d+\] WARNING \| No heartbeat"
)


_REMATERIALIZED = re.compile(
    r"[WE]\d{4} [\d:.]+ +\d+ (?:spmd_partitioner|hlo_rematerialization)\.cc:\d+\] (?P<text>.*)"
)
_OPERATION = re.compile(r'op_name="([^"]*)"')


class WarningFold:
    """Fold of XLA's warnings about rematerialization: one line in each cell.

    XLA writes a warning for each array, of 700 characters, and each rank writes its own.
    """

    def __init__(self) -> None:
        self._has_shown = False

    def shown(self, line: str) -> str:
        """Return the text to show for a line; empty if it is a further warning."""
        warning = _REMATERIALIZED.match(line)
        if warning is None:
            return line
        if self._has_shown:
            return ""
        self._has_shown = True
        operation = _OPERATION.search(line)
        place = f"for {operation[1]}" if operation else f'"{warning["text"]:.100}"'
        return f"XLA rematerializes arrays, first {place}. %dist_logs shows each warning\n"

    def begin(self) -> None:
        """Show the next warning again."""
        self._has_shown = False


class LogTap:
    """Forwards what is written to descriptor 2, the engine's log file.

    The output stays in the file: a pipe that the process must read itself would lose its last words
    when it aborts. Some lines stay in the file only: information and float64 warnings of
    TensorFlow's native code, XLA's errors about preferred instructions of cached programs for CPUs
    (up to JAX 0.9), and ipyparallel's warnings about a busy machine. So do failed
    collectives, because the raised error reports them too.

    Args:
        write: receives the text.

    Attributes:
        fold: fold of XLA's warnings.
    """

    def __init__(self, write: Callable[[str], int]) -> None:
        self.fold = WarningFold()
        self._write = write
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._log = Path("/proc/self/fd/2").open("rb", buffering=0)  # noqa: SIM115 - never closed
        self._log.seek(0, os.SEEK_END)
        self._lock = threading.Lock()
        self._rest = ""
        threading.Thread(target=self._pump, name="nbdist-stderr", daemon=True).start()

    def settle(self) -> None:
        """Forward all output written so far."""
        with self._lock:
            while chunk := self._log.read(1 << 16):
                whole, end, rest = (self._rest + self._decode(chunk)).rpartition("\n")
                self._rest = rest if _NATIVE.match(rest) else ""
                lines = (whole + end).splitlines(keepends=True)
                shown = "".join(self.fold.shown(ln) for ln in lines if not _NOISE.match(ln))
                if shown or not self._rest:
                    self._write(shown + rest[len(self._rest) :])

    def _pump(self) -> None:
        while True:
            time.sleep(_LOG_INTERVAL_S)
            self.settle()


def _split_before(data: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """Split off an end of `data` that may be the beginning of `mark`; returns (kept, ready)."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:length]):
            return data[-length:], data[:-length]
    return b"", data


class RankDisplayPublisher(DisplayPublisher):
    """Publisher of `display(...)` on a rank: it sends a record, not a message to the controller."""

    def __init__(self, reporter: RankReporter, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._reporter = reporter

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
        fields = self._reporter.record_fields()
        record = Display(
            data=data, metadata=metadata or {}, display_id=display_id, update=update, **fields
        )
        self._reporter.send(record)

    def set_parent(self, parent: object) -> None:
        """Ignore the parent request of ipykernel: a record contains the cell instead."""

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing: other ranks share the output area, so a rank cannot clear it."""
        del wait


class RankOutput:
    """Output of this process: its streams, its descriptors and its displays.

    Args:
        reporter: sends the output to the notebook.
    """

    def __init__(self, reporter: RankReporter) -> None:
        self._reporter = reporter
        self._taps: tuple[DescriptorTap | LogTap, ...] = ()

    def take_over(self) -> None:
        """Send all further output to the notebook."""
        shell, reporter = engine_shell(), self._reporter
        stdout = RankStream("stdout", reporter)
        stderr = RankStream("stderr", reporter)
        self._taps = (DescriptorTap(stdout.write), LogTap(stderr.write))
        sys.stdout, sys.stderr = stdout, stderr
        shell.display_pub = RankDisplayPublisher(reporter, parent=shell)

    def settle(self) -> None:
        """Wait until all output written so far has been forwarded."""
        for tap in self._taps:
            tap.settle()
            if isinstance(tap, LogTap):
                tap.fold.begin()
