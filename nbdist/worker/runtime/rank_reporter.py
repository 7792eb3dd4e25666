"""Reporter of one rank: it sends notes, scalars and other records to the notebook."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nbdist.records import (
    AnyEvent,
    Columns,
    Compiled,
    FitBegun,
    Media,
    Metrics,
    Note,
    Rows,
    StepBegun,
)
from nbdist.worker.runtime import media
from nbdist.worker.runtime.reporter import Reporter
from nbdist.worker.runtime.row_buffer import RowBuffer

if TYPE_CHECKING:
    import contextlib

    from nbdist.records import AnyMedia, NoteTopic, WorkerIdentity
    from nbdist.worker.runtime.memory import MemoryGauge


_INTERVAL = Columns(measures=("report_s",))


class RecentReports(msgspec.Struct, frozen=True):
    """Reports of the last seconds of one rank, as a checkpoint contains them.

    Attributes:
        stream: key of the notebook's stream, which no other cluster has.
        run: number of the run.
        cell: number of the cell.
        frames: encoded records of this cell and of earlier ones.
    """

    stream: bytes
    run: int
    cell: int
    frames: list[bytes]


class Recipient(Protocol):
    """Recipient of the records of a rank: the notebook, or the output of an exported program."""

    def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
        """Take a record; if urgent, before the call returns."""
        ...

    def report(self, cell: int, columns: Columns, row: tuple[float, ...]) -> None:
        """Take a row of a step; never blocks."""
        ...

    def flush(self) -> None:
        """Pass on all records."""
        ...

    def recent(self) -> list[bytes]:
        """Pass on all records; return the reports of the last seconds, encoded."""
        ...

    def close(self) -> None:
        """Pass on all records, and take no more."""
        ...


class RankReporter:
    """Sends records of one rank, with its rank and the number of the cell that runs.

    Args:
        identity: the rank, and the address of the notebook's stream.
        gauge: measures the memory of this process, for rows of its own.
        shield: defers interrupts while a record is queued.
        recipient: takes the records; None for the notebook.

    Attributes:
        rank: rank of this process.
        cell: number of the cell that runs; 0 between cells.
        step_ends: ends of all steps by `time.perf_counter`, for measurement. Empty unless telemetry
            is off.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        gauge: MemoryGauge,
        shield: contextlib.AbstractContextManager[None],
        recipient: Recipient | None = None,
    ) -> None:
        self.rank = identity.rank
        self.cell = 0
        self.step_ends: list[float] = []
        self._telemetry = identity.telemetry
        self._stream = identity.stream.server_key
        self._run = 0
        self._shield = shield
        self._reporter = recipient or Reporter(
            identity.stream, RowBuffer(identity.rank, gauge), identity.world_size
        )
        self._noted: set[str] = set()
        self._reported_steps = 0
        self._times_steps = False
        self._last_report: tuple[int, int, float] | None = None
        self._cell_started = time.perf_counter()

    def begin_cell(self, cell: int, seconds: float, run: int = 0) -> None:
        """Report for this cell from now on.

        Args:
            cell: number of the cell.
            seconds: time that earlier attempts of its run have taken.
            run: number of the run, the same in all attempts.
        """
        self.cell = cell
        self._run = run
        self._noted.clear()
        self._reported_steps = 0
        self._times_steps = False
        self._last_report = None
        self._cell_started = time.perf_counter() - seconds

    def seconds(self) -> float:
        """Return the seconds since the cell began."""
        return time.perf_counter() - self._cell_started

    def record_fields(self) -> dict[str, Any]:
        """Return the fields that every record contains."""
        return {"rank": self.rank, "cell": self.cell}

    def send(self, record: AnyEvent, *, urgent: bool = False) -> None:
        """Queue a record; if urgent, wait until it is passed to ZeroMQ."""
        self._times_steps |= isinstance(record, StepBegun | FitBegun)
        with self._shield:
            self._reporter.send(record, urgent=urgent)

    def compiled(self, arguments: int, temporaries: int, seconds: float) -> None:
        """Report the footprint of a compiled step, if this is rank 0.

        Args:
            arguments: bytes of the arguments on one device.
            temporaries: bytes of temporary arrays on one device.
            seconds: duration of the compilation.
        """
        if self.rank == 0:
            self.send(
                Compiled(
                    arguments=arguments,
                    temporaries=temporaries,
                    seconds=seconds,
                    **self.record_fields(),
                )
            )

    def note(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        """Report a line about the run; the notebook shows equal lines of several ranks once."""
        self.send(Note(topic=topic, text=text, warning=warning, **self.record_fields()))

    def note_once(self, topic: NoteTopic, text: str, *, warning: bool = False) -> None:
        """Report a line once per cell."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(topic, text, warning=warning)

    def report(
        self,
        epoch: int = -1,
        step: int | None = None,
        *,
        hist: Any = None,
        image: Any = None,
        table: Any = None,
        text: Any = None,
        **metrics: Any,
    ) -> None:
        """Show scalars, histograms, images, tables and texts of this rank in the notebook, live.

        `hist`, `image`, `table` and `text` take one value, or a dict of values by name:
        `report(loss=loss, hist={"weights": w}, image={"sample": x[0]})`.

        Args:
            epoch: epoch of the values, from 1; -1 for none.
            step: step of the values; by default, reports without an epoch are counted.
            hist: array whose values are counted.
            image: array of shape (height, width[, 1, 3 or 4]): uint8, or floats from 0 to 1.
            table: list of dicts, dict of columns, or data frame.
            text: text.
            **metrics: named scalars; any value that `float` accepts.

        Raises:
            TypeError: a value is not a scalar.
            UsageError: a value cannot be shown as a histogram, an image, a table or a text.
        """
        own = {name: _scalar(name, value) for name, value in metrics.items()}
        given = {"hist": hist, "image": image, "table": table, "text": text}
        contents = [
            (name, media.converted(kind, name, value))
            for kind, values in given.items()
            if values is not None
            for name, value in media.named(kind, values)
        ]
        if step is None:
            self._reported_steps += 1
            step = -1 if epoch >= 0 else self._reported_steps
        if own or not contents:
            self.report_values(epoch, step, own=own, shared={})
            self._measure_interval(epoch, step)
        for name, (content, remark) in contents:
            self.report_media(name, epoch, step, content)
            if remark:
                self.note_once("media", remark)

    def _measure_interval(self, epoch: int, step: int) -> None:
        """Report the seconds since the last report of another step, unless nbdist times steps.

        The row is one of its own, so that the tables of metrics are the same in all cells.
        """
        if step < 0 or self._times_steps or not self._telemetry:
            return
        before, now = self._last_report, self.seconds()
        if before is not None and before[:2] == (epoch, step):
            return
        self._last_report = epoch, step, now
        if before is not None:
            with self._shield:
                self._reporter.report(self.cell, _INTERVAL, (epoch, step, now, now - before[2]))

    def report_media(self, name: str, epoch: int, step: int, content: AnyMedia) -> None:
        """Show a histogram, an image, a table or a text, unless telemetry is off."""
        if self._telemetry:
            place: dict[str, Any] = {"epoch": epoch, "step": step, "time_s": self.seconds()}
            self.send(Media(name=name, content=content, **place, **self.record_fields()))

    def report_values(
        self,
        epoch: int,
        step: int,
        *,
        own: dict[str, float],
        shared: dict[str, float],
        measured: dict[str, float] | None = None,
    ) -> None:
        """Show scalars: this rank's own, those that are equal on all ranks, and measurements.

        Scalars of a step are sent in rows, many at a time; those of an epoch are sent at once.
        Without telemetry, those of a step are not sent.
        """
        if step >= 0 and not self._telemetry:
            self.step_ends.append(time.perf_counter())
            return
        seconds = self.seconds()
        if step < 0:
            fields = self.record_fields()
            self.send(
                Metrics(epoch=epoch, step=step, time_s=seconds, own=own, shared=shared, **fields)
            )
            return
        measured = measured or {}
        columns = Columns(measures=tuple(measured), own=tuple(own), shared=tuple(shared))
        row = (epoch, step, seconds, *measured.values(), *own.values(), *shared.values())
        with self._shield:
            self._reporter.report(self.cell, columns, row)

    def flush(self) -> None:
        """Pass all records to ZeroMQ, so that none is lost when this process ends."""
        with self._shield:
            self._reporter.flush()

    def recent(self) -> RecentReports:
        """Pass all records to ZeroMQ; return the reports of the last seconds."""
        with self._shield:
            frames = self._reporter.recent()
        return RecentReports(stream=self._stream, run=self._run, cell=self.cell, frames=frames)

    def repeat(self, reports: RecentReports) -> None:
        """Send the values of a lost rank again if they belong to this run of the same notebook.

        The notebook drops those that it has received.
        """
        if (reports.stream, reports.run) != (self._stream, self._run):
            return
        decoder = msgspec.msgpack.Decoder(AnyEvent)
        for record in map(decoder.decode, reports.frames):
            if isinstance(record, Rows | Metrics) and record.cell == reports.cell:
                self.send(msgspec.structs.replace(record, cell=self.cell))
        self.flush()  # before later values: the notebook takes older ones for duplicates

    def close(self) -> None:
        """Send the pending records before the process ends."""
        self._reporter.close()


def _scalar(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"report({name}={value!r}): not a scalar ({error})") from None
