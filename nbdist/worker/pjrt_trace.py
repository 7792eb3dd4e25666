"""JAX's profiler on one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.traces import Span, kind_on_device, newest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.worker.traces import Kind

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
)
_CONTROL = re.compile(r"(while|call|conditional)\b")
"""Operations that only hold others."""

_TRANSFERS: dict[str, Kind] = {
    "DevicePutWithSharding": "to_device",
    "np.asarray(jax.Array)": "to_host",
}


class PjrtTracer:
    """Traces what the devices do, and not Python: that would be ten times slower."""

    must_sample = True

    def start(self, folder: Path) -> bool:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 2
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # only one trace may be under way: the user has begun another
            return False
        return True

    def stop(self) -> None:
        jax.profiler.stop_trace()

    def read(self, folder: Path) -> list[Span]:
        spans: list[Span] = []
        for plane in jax.profiler.ProfileData.from_file(str(newest(folder))).planes:
            on_device = re.match(r"/device:[A-Z]+:(\d+)", plane.name)
            for line in plane.lines:
                if on_device and line.name.startswith("Stream"):
                    spans += _of_stream(line.events, int(on_device[1]))
                elif plane.name == "/host:CPU":
                    spans += _of_host(line.events)
        return spans


def _of_stream(events: Any, device: int) -> Iterator[Span]:
    for event in events:
        yield _span(kind_on_device(event.name), event, {"device_ordinal": device})


def _of_host(events: Any) -> Iterator[Span]:
    """Operations of CPU devices, which are told by what they say of themselves, and copies."""
    for event in events:
        name = event.name
        if name in _TRANSFERS:
            yield _span(_TRANSFERS[name], event, {})
        elif "::" in name or name.startswith("end: ") or _CONTROL.match(name):
            continue
        elif "hlo_op" in (said := dict(event.stats)):
            yield _span("collective" if _COLLECTIVE.match(name) else "compute", event, said)


def _span(kind: Kind, event: Any, said: dict[str, Any]) -> Span:
    begin_s, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
    device, run = said.get("device_ordinal", 0), said.get("run_id", 0)
    return Span(kind, event.name, device, run, begin_s, begin_s + seconds)
