"""Doubles for modules of the worker that report to a notebook or run steps of a framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from nbdist.records import Compiled, Note
from nbdist.worker.runtime.rank_reporter import RecentReports
from nbdist.worker.training.parity import Findings
from nbdist.worker.training.step_contract import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import AnyEvent, Difference, NoteTopic, Plan, Rate
    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.checkpoint.folder import Own
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.profiling.trace import Span
    from nbdist.worker.training.step_contract import Footprint


class Reported(NamedTuple):
    """Arguments of a call of `report_values`."""

    epoch: int
    step: int
    own: dict[str, float]
    shared: dict[str, float]
    measured: dict[str, float]


class Recorder:
    """Double of a `RankReporter` that collects records instead of sending them."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.cell = 3
        self.records: list[AnyEvent] = []
        self.values: list[Reported] = []
        self.repeated: list[RecentReports] = []

    def record_fields(self) -> dict[str, Any]:
        return {"rank": self.rank, "cell": self.cell}

    def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
        del urgent
        self.records.append(record)

    def note(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        self.send(Note(topic=topic, text=text, warning=warning, **self.record_fields()))

    def note_once(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        if "!" * warning + text not in self.notes(topic):
            self.note(topic, text, warning=warning)

    def compiled(self, arguments: int, temporaries: int, seconds: float) -> None:
        found: dict[str, Any] = {"arguments": arguments, "temporaries": temporaries}
        self.send(Compiled(seconds=seconds, **found, **self.record_fields()))

    def report_values(
        self,
        epoch: int,
        step: int,
        *,
        own: dict[str, float],
        shared: dict[str, float],
        measured: dict[str, float] | None = None,
    ) -> None:
        self.values.append(Reported(epoch, step, own, shared, measured or {}))

    def recent(self) -> RecentReports:
        return RecentReports(stream=b"key", run=1, cell=2, frames=[f"rank {self.rank}".encode()])

    def repeat(self, reports: RecentReports) -> None:
        self.repeated.append(reports)

    def of(self, kind: type) -> list[Any]:
        """Return the records of one type."""
        return [record for record in self.records if isinstance(record, kind)]

    def notes(self, topic: str) -> list[str]:
        """Return the texts of the notes of one topic; those of warnings begin with `!`."""
        found = [record for record in self.of(Note) if record.topic == topic]
        return ["!" * record.warning + record.text for record in found]


class RecordedTracer:
    """Double of a profiler that creates a file for each trace.

    Args:
        is_free: False if another trace is running.
    """

    must_sample = True

    def __init__(self, is_free: bool = True) -> None:
        self.calls: list[str] = []
        self.spans: list[Span] = []
        self.is_free = is_free
        self._folder = Path()

    def start(self, folder: Path) -> bool:
        self.calls.append("start")
        self._folder = folder
        return self.is_free

    def stop(self) -> None:
        self.calls.append("stop")
        (self._folder / "trace").touch()

    def read(self, folder: Path) -> list[Span]:
        assert (folder / "trace").exists()
        return self.spans


class NumberState:
    """Double of a framework's state: one number that ranks share, and one of each rank."""

    kind = "numbers"
    is_empty = False
    names = ("w",)

    def __init__(self, own: int = 0) -> None:
        self.number = 0
        self.own_number = own
        self.assists = 0
        self.restored: list[Own] = []

    def size(self) -> int:
        return 8

    def copy(self) -> Callable[[Path], None]:
        number = self.number

        def write(folder: Path) -> None:
            folder.mkdir(parents=True)
            (folder / "number").write_text(str(number))

        return write

    def assist(self) -> None:
        self.assists += 1

    def own(self) -> dict[str, np.ndarray]:
        return {"own": np.array(self.own_number)}

    def digests(self) -> list[Digest]:
        return []

    def restore(self, folder: Path, own: Own) -> None:
        self.number = int((folder / "number").read_text())
        self.own_number = int(own.values["own"])
        self.restored.append(own)


class SumStep:
    """Double of a framework's step: it adds the batch's sum to a number and reports the mean.

    Args:
        results: results of steps by number, in place of the mean.
    """

    replicas = 1
    shards = 1
    plan: Plan | None = None
    footprint: Footprint | None = None
    changes = ("w",)
    hyperparameters: ClassVar[dict[str, float | str]] = {"learning_rate": 0.1}

    def __init__(self, results: dict[int, StepResult] | None = None) -> None:
        self.reduced = False
        self.tracer = RecordedTracer()
        self.calls: list[str] = []
        self.steps = 0
        self.compiled: dict[int, int] = {}
        self.numbers = NumberState()
        self.differences: tuple[Difference, ...] = ()
        self.warmups: list[tuple[int, int]] = []
        self._results = results or {}

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[None]

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        self.warmups.append((warmup_steps, made))
        return ()

    def check(self, batch: Batch) -> Findings:
        del batch
        self.calls.append("check")
        return Findings(self.differences, ("Take the mean.",))

    def layout(self, batch: Batch) -> Plan:
        raise NotImplementedError

    def prepare(self, batch: Batch) -> None:
        del batch
        self.calls.append("prepare")

    def state(self) -> NumberState:
        self.calls.append("state")
        return self.numbers

    def step(self, batch: Batch) -> tuple[int, float]:
        self.steps += 1
        self.calls.append(f"step {self.steps}")
        self.numbers.number += int(batch.values[0].sum())
        return self.steps, float(batch.values[0].mean())

    def read(self, report: tuple[int, float]) -> StepResult:
        number, mean = report
        self.calls.append(f"read {number}")
        return self._results.get(number) or StepResult({"loss": mean}, finite=True)

    def compilations(self) -> int:
        return self.compiled.get(self.steps, 1)

    def write_back(self) -> None:
        self.calls.append("write back")

    def finish(self) -> None:
        self.calls.append("finish")
