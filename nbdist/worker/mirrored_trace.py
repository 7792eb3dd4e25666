"""TensorFlow's profiler on one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from nbdist.worker.traces import Span, kind_on_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.worker.traces import Kind

_OPERATION = re.compile(r"[^:]+:([A-Z_]\w*)")
"""What a kernel is called: the node's name and the operation's type."""

_COLLECTIVES = ("CollectiveReduce", "CollectiveGather", "CollectiveAllToAll", "Nccl")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "While", "If", "StatelessWhile")
"""Operations that only hold others."""

_TRANSFERS: dict[str, Kind] = {"EagerCopyToDevice": "to_device"}


class MirroredTracer:
    """Traces what the devices do, and not Python."""

    must_sample = False

    def start(self, folder: Path) -> bool:
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0
        )
        try:
            tf.profiler.experimental.start(str(folder), options)
        except tf.errors.AlreadyExistsError:  # the user has begun another
            return False
        return True

    def stop(self) -> None:
        tf.profiler.experimental.stop()

    def read(self, folder: Path) -> list[Span]:
        (file,) = folder.rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
        spans: list[Span] = []
        for plane in space.planes:
            names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
            on_device = re.match(r"/device:GPU:(\d+)", plane.name)
            for line in plane.lines:
                if on_device and line.name.startswith("Stream"):
                    device = int(on_device[1])
                    spans += (
                        _span(kind_on_device(name), name, device, line, event)
                        for event in line.events
                        for name in (names[event.metadata_id],)
                    )
                elif plane.name == "/host:CPU":
                    spans += _of_host(line, names)
        return spans


def _of_host(line: Any, names: dict[int, str]) -> Iterator[Span]:
    for event in line.events:
        name = names[event.metadata_id]
        operation = _OPERATION.fullmatch(name)
        if name in _TRANSFERS:
            yield _span(_TRANSFERS[name], name, 0, line, event)
        elif operation is not None and operation[1] not in _CALLS:
            kind: Kind = "collective" if operation[1].startswith(_COLLECTIVES) else "compute"
            yield _span(kind, name, 0, line, event)


def _span(kind: Kind, name: str, device: int, line: Any, event: Any) -> Span:
    begin_s = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
    return Span(kind, name, device, 0, begin_s, begin_s + event.duration_ps / 1e12)
