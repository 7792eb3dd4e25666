"""Profiler trace of one cell on this rank, or in a plain kernel that has JAX.

The trace begins and ends between cells, on the thread that runs them. Devices run behind the lines
that launch their work, so the end waits a short time for work under way.
"""

from __future__ import annotations

import linecache
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import TracedRank
from nbdist.worker.profiling.cell_lines import CellLines
from nbdist.worker.profiling.trace import newest
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.profiling.trace_tables import Place

_MARK = "nbdist: the traced cell"
_SETTLE_S = 10.0
"""Seconds to wait for work under way. On a rank that lost others, it might never end."""

_POLL_S = 0.001

_NOTHING = "nothing ran on a device: the cell gave JAX nothing to compute or to copy"
_NO_LINES = (
    "launches of programs were not recorded to the end: a debugger is active, or the cell ran "
    "too many lines; some operations may be shown at another line"
)


class CellTrace:
    """A trace under way. One for each process, because JAX has one profiler."""

    def __init__(self) -> None:
        import jax

        self._jax = jax
        self._folder = Path(tempfile.mkdtemp(prefix="nbdist-trace-"))
        self._lines = CellLines(engine_shell())
        self._is_cached = bool(jax.config.jax_enable_compilation_cache)

    def begin(self) -> bool:
        """Begin the trace; return False if another trace is under way."""
        from nbdist.worker.profiling.jax_profiler import PjrtTracer

        self._tracer = PjrtTracer()
        if not self._tracer.start(self._folder):
            self._folder.rmdir()
            return False
        self._use_cache(allowed=False)
        with self._jax.profiler.TraceAnnotation(_MARK):
            pass
        self._lines.begin()
        return True

    def end(self, *, with_file: bool) -> TracedRank:
        """End the trace, remove its files and return its result.

        Args:
            with_file: True to include the profiler's file.
        """
        self._lines.end()
        self._use_cache(allowed=True)
        try:
            self._settle()
            self._tracer.stop()
            file = newest(self._folder).read_bytes()
        finally:
            shutil.rmtree(self._folder)
        return self._read(file, with_file=with_file)

    def _use_cache(self, *, allowed: bool) -> None:
        """Disable or restore JAX's compilation cache: cached programs contain old line numbers."""
        from jax.experimental.compilation_cache.compilation_cache import reset_cache

        self._jax.config.update("jax_enable_compilation_cache", allowed and self._is_cached)
        reset_cache()  # JAX reads the setting only once

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        for array in self._jax.live_arrays():
            while not (array.is_deleted() or array.is_ready()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _read(self, file: bytes, *, with_file: bool) -> TracedRank:
        from nbdist.worker.profiling import trace_tables
        from nbdist.worker.profiling.hlo_lines import programs_of
        from nbdist.worker.profiling.jax_profiler import spans_of, thread_of

        data = self._jax.profiler.ProfileData.from_serialized_xspace(file)
        thread = thread_of(data, _MARK)
        started_s = thread.started_ns / 1e9
        devices = self._jax.local_devices()
        # The operations of a CPU contain its number among the devices of all ranks.
        numbers = {one.id: one.local_hardware_id for one in devices if one.platform == "cpu"}
        spans = [s._replace(device=numbers.get(s.device, s.device)) for s in spans_of(data)]
        spent = trace_tables.spent_of(spans, programs_of(file), thread, self._lines)
        ends_s = [part.span.end_s + started_s for part in spent]
        seconds = self._lines.seconds(started_s, max(ends_s, default=0.0))
        own = [device.local_hardware_id for device in devices]
        return TracedRank(
            seconds=seconds,
            by_operation=trace_tables.by_operation(spent),
            by_device=trace_tables.by_device(spent, own, seconds),
            by_line=trace_tables.by_line(spent, _text),
            notes=tuple(self._notes(is_empty=not spent)),
            file=file if with_file else b"",
            timeline=trace_tables.timeline(spent, thread),
        )

    def _notes(self, *, is_empty: bool) -> Iterator[str]:
        if is_empty:
            yield _NOTHING
        if not self._lines.is_whole:
            yield _NO_LINES


def _text(place: Place) -> str:
    """Return a line of an earlier cell. The notebook knows the lines of the cell itself."""
    return linecache.getline(place.file, place.line).strip() if place.file else ""


_open: list[CellTrace] = []


def begin() -> bool:
    """Trace this thread from now on; return False if another trace is under way."""
    end(False)
    trace = CellTrace()
    if trace.begin():
        _open.append(trace)
        return True
    return False


def end(with_file: bool) -> bytes:
    """End the trace.

    Args:
        with_file: True to include the profiler's file.

    Returns:
        A `TracedRank` as MessagePack; empty if no trace is under way.
    """
    return msgspec.msgpack.encode(_open.pop().end(with_file=with_file)) if _open else b""
