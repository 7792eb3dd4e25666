"""Spans that a profiler recorded during some steps, independent of the framework."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from nbdist.records import SpentKind
from nbdist.worker.runtime.spans import covered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Kind = SpentKind
KINDS: tuple[Kind, ...] = ("compute", "collective", "to_device", "to_host")

NO_PROGRAM = -1


class Span(NamedTuple):
    """Operation on a device.

    Attributes:
        kind: Kind of the operation.
        name: Name from the framework.
        device: Number of the device within the rank.
        run: Id of the program's execution; 0 if unknown.
        begin_s: Start in seconds on the profiler's clock.
        end_s: End in seconds on the profiler's clock.
        program: Id of the program that contains the operation; `NO_PROGRAM` if there is none.
        module: XLA's name of that program, such as `jit_step`; empty if there is none.
        operation: Name of the operation within the program.
    """

    kind: Kind
    name: str
    device: int
    run: int
    begin_s: float
    end_s: float
    program: int = NO_PROGRAM
    module: str = ""
    operation: str = ""


class Tracer(Protocol):
    """Profiler of one framework.

    Attributes:
        must_sample: True if only this profiler can time collectives; otherwise steps time them.
    """

    must_sample: bool

    def start(self, folder: Path) -> bool:
        """Start to trace; returns False if another trace is running."""
        ...

    def stop(self) -> None:
        """Stop the trace, and write it to the folder."""
        ...

    def read(self, folder: Path) -> list[Span]:
        """Read the traced spans; callable from any thread."""
        ...


class NoTracer:
    """Tracer without a profiler: steps measure their own times, and operations are not recorded.

    TensorFlow's profiler (2.21) is not usable in engines: they are forked after the import of
    TensorFlow. In such a process, stopping the profiler frees memory twice after threads have
    ended.
    """

    must_sample = False

    def start(self, folder: Path) -> bool:
        del folder
        return True

    def stop(self) -> None:
        pass

    def read(self, folder: Path) -> list[Span]:
        del folder
        return []


def kind_on_device(name: str) -> Kind:
    """Return the kind of a kernel, collective or copy on an accelerator's timeline, by its name."""
    lowered = name.lower()
    if "nccl" in lowered or "rccl" in lowered:
        return "collective"
    if "h2d" in lowered or "htod" in lowered:
        return "to_device"
    return "to_host" if "d2h" in lowered or "dtoh" in lowered else "compute"


def collective_seconds(spans: Iterable[Span], steps: int) -> list[float]:
    """Return the seconds of collectives in each step, the minimum over the rank's devices.

    If the number of executions differs from `steps`, each step gets an equal share.
    """
    by_run: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.kind == "collective":
            by_run[span.device][span.run].append(span)
    if not by_run:
        return [0.0] * steps
    return [min(each) for each in zip(*(_by_step(r, steps) for r in by_run.values()), strict=True)]


def _by_step(runs: dict[int, list[Span]], steps: int) -> list[float]:
    spent = [(min(s.begin_s for s in spans), _covered(spans)) for spans in runs.values()]
    if len(spent) != steps:
        return [sum(seconds for _, seconds in spent) / steps] * steps
    return [seconds for _, seconds in sorted(spent)]


def attributed(spans: Sequence[Span]) -> dict[Kind, float]:
    """Return the seconds of each kind, averaged over devices.

    Where kinds overlap, the time counts for the first one in `KINDS`.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    devices = {span.device for span in spans}
    for device in devices:
        seen: list[Span] = []
        before = 0.0
        for kind in KINDS:
            seen += [span for span in spans if span.device == device and span.kind == kind]
            total = _covered(seen)
            seconds[kind] += (total - before) / len(devices)
            before = total
    return seconds


def newest(folder: Path) -> Path:
    """Return the file of the latest trace in a folder.

    Raises:
        FileNotFoundError: The folder contains no trace.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace was written to {folder}")
    return files[-1]


def _covered(spans: Sequence[Span]) -> float:
    return covered(np.array([(s.begin_s, s.end_s) for s in spans]).reshape(-1, 2))
