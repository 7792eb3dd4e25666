"""JAX's profiler on one rank."""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from nbdist.records import INPUT_WAIT
from nbdist.worker.profiling.trace import NO_PROGRAM, Span, kind_on_device, newest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.worker.profiling.trace import Kind

_COLLECTIVE = re.compile(
    r"(fusion of )?(all[-_](reduce|gather|to[-_]all)|reduce[-_]scatter|collective[-_](permute"
    r"|broadcast)|ragged[-_]all[-_]to[-_]all|psum|pmax|pmin|ppermute|pbroadcast)"
)
"""Names of collectives in XLA and JAX; from JAX 0.10 on, names such as `psum_invariant.7`."""

_CONTROL = re.compile(r"(while|call|closed_call|conditional|cond)\b")
"""Operations that only contain others."""

_TRANSFERS: dict[str, Kind] = {
    "DevicePutWithSharding": "to_device",
    "np.asarray(jax.Array)": "to_host",
}
_STARTED = "profile_start_time"
_OF_PROGRAM = ("program_id", "hlo_module", "hlo_op")
_LAUNCH = re.compile(r"PjitFunction\((.*)\)$")


class PjrtTracer:
    """Tracer of the devices without Python, whose tracing would be ten times slower."""

    must_sample = True

    def start(self, folder: Path) -> bool:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 2
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # only one trace can run, and the user has started another
            return False
        return True

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the user stopped the trace; its data is written
            jax.profiler.stop_trace()

    def read(self, folder: Path) -> list[Span]:
        return spans_of(jax.profiler.ProfileData.from_file(str(newest(folder))))


def is_collective(name: str) -> bool:
    """Return True if an operation is a collective, by its name or its opcode."""
    return _COLLECTIVE.match(name) is not None


def holds_others(name: str) -> bool:
    """Return True if an operation only contains others, by its name or its opcode."""
    return _CONTROL.match(name) is not None


def is_host_copy(span: Span) -> bool:
    """Return True if a copy was recorded on the host, without a device."""
    return span.name in _TRANSFERS


@contextlib.contextmanager
def _allowing_new_types() -> Iterator[None]:
    """Ignore Python's warning about types that JAX creates when a profile is first read.

    If warnings are errors, this one ends the process (JAX 0.12, nanobind).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@_allowing_new_types()
def spans_of(data: jax.profiler.ProfileData) -> list[Span]:
    """Return the device operations and the host's copies; those of CPUs belong to device 0."""
    spans: list[Span] = []
    for plane in data.planes:
        on_device = re.match(r"/device:[A-Z]+:(\d+)", plane.name)
        for line in plane.lines:
            if on_device and line.name.startswith("Stream"):
                spans += _of_stream(line.events, int(on_device[1]))
            elif plane.name == "/host:CPU":
                spans += _of_host(line.events)
    return spans


@dataclass(frozen=True)
class HostThread:
    """Activity of one host thread, in seconds of the profiler's clock.

    Attributes:
        started_ns: Start of that clock, in nanoseconds since the epoch.
        launches: Launched programs: name of the function, and time in seconds.
        copies: Start times of the copies that are also spans, in seconds.
        inputs: Begin and end of each wait for a batch, in seconds.
    """

    started_ns: int
    launches: tuple[tuple[str, float], ...]
    copies: frozenset[float]
    inputs: tuple[tuple[float, float], ...] = ()


@_allowing_new_types()
def thread_of(data: jax.profiler.ProfileData, mark: str) -> HostThread:
    """Return the thread that entered a `jax.profiler.TraceAnnotation` with a name.

    Raises:
        LookupError: No thread entered it.
    """
    for line in data.find_plane_with_name("/host:CPU").lines:
        events = [(e.start_ns / 1e9, e.duration_ns / 1e9, e.name) for e in line.events]
        if any(name == mark for _, _, name in events):
            return HostThread(
                started_ns=dict(data.find_plane_with_name("Task Environment").stats)[_STARTED],
                launches=tuple(_launches(sorted(events))),
                copies=frozenset(begin_s for begin_s, _, name in events if name in _TRANSFERS),
                inputs=tuple((t, t + length) for t, length, name in events if name == INPUT_WAIT),
            )
    raise LookupError(f"no thread entered the annotation {mark!r} during the trace")


def _launches(events: list[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Yield the outermost launches: an inner function is part of the outer program."""
    until_s = 0.0
    for begin_s, seconds, name in events:
        if begin_s >= until_s and (launch := _LAUNCH.match(name)):
            until_s = begin_s + seconds
            yield launch[1], begin_s


def _of_stream(events: Any, device: int) -> Iterator[Span]:
    for event in events:
        stats = {k: v for k, v in event.stats if k in _OF_PROGRAM}
        yield _span(kind_on_device(event.name), event, {**stats, "device_ordinal": device})


def _of_host(events: Any) -> Iterator[Span]:
    """Yield operations of CPU devices, identified by their metadata, and copies."""
    for event in events:
        name = event.name
        if name in _TRANSFERS:
            yield _span(_TRANSFERS[name], event, {})
        elif "::" in name or name.startswith("end: ") or holds_others(name):
            continue
        elif "hlo_op" in (stats := dict(event.stats)):
            yield _span("collective" if is_collective(name) else "compute", event, stats)


def _span(kind: Kind, event: Any, stats: dict[str, Any]) -> Span:
    begin_s = event.start_ns / 1e9
    return Span(
        kind=kind,
        name=event.name,
        device=stats.get("device_ordinal", 0),
        run=stats.get("run_id", 0),
        begin_s=begin_s,
        end_s=begin_s + event.duration_ns / 1e9,
        program=stats.get("program_id", NO_PROGRAM),
        module=stats.get("hlo_module", ""),
        operation=stats.get("hlo_op", ""),
    )
