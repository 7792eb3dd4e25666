"""What a profiler saw of some steps, whichever framework's it was."""

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
    """An operation on a device.

    Attributes:
        kind: what it is.
        name: what the framework calls it.
        device: the device's number within the rank.
        run: tells the executions of a program apart; 0 where that is unknown.
        begin_s: on the profiler's clock.
        end_s: on the same.
        program: the id of the program that it is part of; `NO_PROGRAM` where it is of none.
        module: what XLA calls that program, as in `jit_step`; empty where it is of none.
        operation: its name within the program.
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
    """One framework's profiler.

    Attributes:
        must_sample: collectives can be timed with it only: steps do not time theirs.
    """

    must_sample: bool

    def start(self, folder: Path) -> bool:
        """Begin to trace; False where somebody else's trace is under way."""
        ...

    def stop(self) -> None:
        """End the trace, and write it to the folder."""
        ...

    def read(self, folder: Path) -> list[Span]:
        """What was traced; for any thread."""
        ...


class NoTracer:
    """No profiler: steps tell their times themselves, and operations are not seen.

    TensorFlow's own (2.21) cannot be used: in a process that was forked after TensorFlow had been
    imported, as engines are, its stop frees memory twice once threads have come and gone.
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
    """Of what an accelerator's own timeline shows: kernels, collectives and copies."""
    lowered = name.lower()
    if "nccl" in lowered or "rccl" in lowered:
        return "collective"
    if "h2d" in lowered or "htod" in lowered:
        return "to_device"
    return "to_host" if "d2h" in lowered or "dtoh" in lowered else "compute"


def collective_seconds(spans: Iterable[Span], steps: int) -> list[float]:
    """Of each step, the least over the rank's devices.

    Where executions are not as many as steps, each has an equal share of all.
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
    """Seconds of each kind, the mean over devices; what an earlier kind hides counts as its own."""
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
    """The file of the last trace; there may be earlier ones.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no trace was written to {folder}")
    return files[-1]


def _covered(spans: Sequence[Span]) -> float:
    return covered(np.array([(s.begin_s, s.end_s) for s in spans]).reshape(-1, 2))
