"""Event files of a run for TensorBoard, written during the run.

events/
    rank-<N>/           values and media of the rank, and measurements of nbdist
    all/                values shared by all ranks, and means of their own values

The tables contain every row. The event files contain as many as a page can show.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
import time
from typing import TYPE_CHECKING

from nbdist.records import PLACE, DataTable, Histogram, Image
from nbdist.telemetry.tables import as_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nbdist.records import AnyMedia, Columns, Media, Metrics, Rows


EVENTS_PER_S = 200
"""Approximate limit over all ranks: an event with five metrics takes 30 us to write."""

INTERVAL_S = 1.0
MOST_WAITING = 10_000
"""Maximum number of steps that wait for slower ranks. Beyond it, the mean is dropped."""

_LARGEST_PLACE = 2.0**53
_RANK, _EPOCH, _STEP, _TIME = range(len(PLACE))

Row = tuple[float, ...]


class EventFiles:
    """Event files of one run. A disk error ends them but is not raised.

    Args:
        folder: folder of the files, created with the first event.
        began: start of the run, in seconds since 1970.
        opened: time at which the directory was reopened, in seconds since 1970, or 0 if it is new.
            A killed process may leave a partial record. TensorBoard then continues only with the
            next file.

    Attributes:
        fault: reason why the files end early, empty if they are complete.
    """

    def __init__(self, folder: Path, began: float, opened: float = 0.0) -> None:
        self.fault = ""
        self._name = f"events.out.tfevents.{opened or began:.0f}.nbdist"
        self._folder = folder
        self._began = began
        self._lock = threading.Lock()
        self._taken: list[Rows] = []
        self._taken_media: list[Media] = []
        self._tables: dict[Columns, _Table] = {}
        self._since = 0.0

    def take(self, record: Rows | Metrics) -> None:
        """Buffer a rank's report until the next `flush`. Thread-safe."""
        if not self.fault:
            with self._lock:
                self._since = self._since if self._taken else time.monotonic()
                self._taken.append(as_rows(record))

    def take_media(self, media: Media) -> None:
        """Buffer a histogram, an image, a table or a text until the next `flush`. Thread-safe."""
        if not self.fault:
            with self._lock:
                self._taken_media.append(media)

    def flush(self) -> None:
        """Write the buffered reports if the oldest has waited for `INTERVAL_S`."""
        if time.monotonic() - self._since >= INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Write the remaining reports, at least the last row of each rank."""
        with self._lock:
            taken, self._taken = self._taken, []
            media, self._taken_media = self._taken_media, []
        if (taken or media) and not self.fault:
            try:
                self._write(taken)
                self._write_media(media)
            except OSError as error:
                self.fault = f"the event files for TensorBoard end early: {error}"

    def _write(self, taken: list[Rows]) -> None:
        for rows in taken:
            if rows.columns not in self._tables:
                self._tables[rows.columns] = _Table(rows.columns)
            self._tables[rows.columns].take(rows)
        stride, waiting = 1, sum(table.waiting() for table in self._tables.values())
        while waiting > stride * EVENTS_PER_S:
            stride *= 2  # powers of two, so that ranks have sampled steps in common
        records: dict[str, bytearray] = {}
        for table in self._tables.values():
            for name, row, values in table.events(stride):
                at = self._began + row[_TIME]
                event = scalars_record(at, int(_place(row)), values)
                records.setdefault(name, bytearray()).extend(event)
        for name, content in records.items():
            self._append(name, bytes(content))

    def _write_media(self, taken: list[Media]) -> None:
        for media in taken:
            at, place = self._began + media.time_s, max(media.step, media.epoch, 0)
            record = media_record(at, place, media.name, media.content)
            self._append(f"rank-{media.rank}", record)

    def _append(self, name: str, content: bytes) -> None:
        folder = self._folder / name
        self._folder.mkdir(exist_ok=True)  # without its parent, to not recreate a deleted run
        folder.mkdir(exist_ok=True)
        with (folder / self._name).open("ab") as file:
            file.write(content if file.tell() else first_record() + content)


class _Table:
    """Rows of one set of columns."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._row = struct.Struct(f"<{len(columns.names)}d")
        self._data: dict[int, bytearray] = {}
        self._passed: dict[int, int] = {}
        self._common: dict[float, dict[int, Row]] = {}

    def take(self, rows: Rows) -> None:
        whole = len(rows.values) - len(rows.values) % self._row.size
        self._data.setdefault(rows.rank, bytearray()).extend(rows.values[:whole])

    def waiting(self) -> int:
        """Return the number of rows to write."""
        return sum(map(len, self._data.values())) // self._row.size

    def events(self, stride: int) -> Iterator[tuple[str, Row, dict[str, float]]]:
        """Yield file name, row and values: every `stride`th row of each rank, and its last one."""
        data, self._data = self._data, {}
        for rank, content in data.items():
            for row in self._chosen(rank, content, stride):
                if own := self._own(row):
                    yield f"rank-{rank}", row, own
                self._common.setdefault(_place(row), {})[rank] = row
        yield from self._of_all()

    def _chosen(self, rank: int, content: bytearray, stride: int) -> Iterator[Row]:
        passed, count = self._passed.get(rank, 0), len(content) // self._row.size
        self._passed[rank] = passed + count
        for index in range(count):
            if (passed + index) % stride == 0 or index == count - 1:
                row = self._row.unpack_from(content, index * self._row.size)
                if 0 <= _place(row) <= _LARGEST_PLACE:
                    yield row

    def _of_all(self) -> Iterator[tuple[str, Row, dict[str, float]]]:
        """Yield the steps that every rank has reached. Ranks without such rows are ignored."""
        common = self._common
        for place in [p for p, rows in common.items() if len(rows) == len(self._passed)]:
            rows = list(common.pop(place).values())
            if values := self._shared(rows):
                yield "all", rows[0], values
        for place in list(common)[: max(0, len(common) - MOST_WAITING)]:
            del common[place]

    def _own(self, row: Row) -> dict[str, float]:
        measures, own = self._columns.measures, self._columns.own
        tags = [f"nbdist/{name}" for name in measures]
        tags += [_tag(name, row) for name in own]
        return dict(zip(tags, row[len(PLACE) :], strict=False))  # shared values follow

    def _shared(self, rows: list[Row]) -> dict[str, float]:
        first = len(PLACE) + len(self._columns.measures)
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)][first:]
        names = [_tag(name, rows[0]) for name in (*self._columns.own, *self._columns.shared)]
        return dict(zip(names, means, strict=True))


def _place(row: Row) -> float:
    """Return the step of a row, or else its epoch."""
    return row[_STEP] if row[_STEP] >= 0 else row[_EPOCH]


def _tag(name: str, row: Row) -> str:
    """Return the tag of a metric. Epoch metrics have another axis and the name that Keras uses."""
    return f"epoch_{name}" if row[_STEP] < 0 else name


FILE_VERSION = b"brain.Event:2"
_LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
_CASTAGNOLI = 0x82F63B78  # polynomial of CRC-32C with reversed bits
_WORD = 0xFFFFFFFF


def first_record() -> bytes:
    """Return the first record of a file."""
    return _record(struct.pack("<Bd", 0x09, 0.0) + b"\x1a" + _sized(FILE_VERSION))


def scalars_record(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a record with scalars of one step.

    Args:
        time_s: seconds since 1970.
        step: 0 or more.
        values: values by tag, stored as float32. Larger values become infinite.
    """
    summary = b"".join(_value_of(tag) + _float32(value) for tag, value in values.items())
    return _summary_record(time_s, step, summary)


def media_record(time_s: float, step: int, tag: str, content: AnyMedia) -> bytes:
    """Return a record with a histogram, an image or a text. A table becomes a text in Markdown.

    Args:
        time_s: seconds since 1970.
        step: 0 or more.
        tag: tag of the content.
        content: the content.
    """
    if isinstance(content, Histogram):
        value = _field(5, _histogram(content))
    elif isinstance(content, Image):
        value = _field(4, _image(content))
    else:
        text = _markdown(content) if isinstance(content, DataTable) else content.text
        tensor = b"\x08\x07" + _field(8, text.encode())  # DT_STRING
        value = _field(9, _field(1, _field(1, b"text"))) + _field(8, tensor)
    return _summary_record(time_s, step, _field(1, _field(1, tag.encode()) + value))


def _histogram(content: Histogram) -> bytes:
    """Return a `HistogramProto`."""
    square = content.deviation**2 + content.mean**2
    moments = (
        content.edges[0],
        content.edges[-1],
        float(content.size),
        content.mean * content.size,
        square * content.size,
    )
    numbers = b"".join(
        struct.pack("<Bd", field << 3 | 1, value) for field, value in enumerate(moments, 1)
    )
    bins = len(content.counts)
    return b"".join(
        (
            numbers,
            _field(6, struct.pack(f"<{bins}d", *content.edges[1:])),
            _field(7, struct.pack(f"<{bins}d", *content.counts)),
        )
    )


def _image(content: Image) -> bytes:
    """Return a `Summary.Image`. The colours are those of the PNG."""
    size = b"\x08" + _varint(content.height) + b"\x10" + _varint(content.width)
    return size + b"\x18\x03" + _field(4, content.png)


def _markdown(table: DataTable) -> str:
    rows = [table.columns, ("---",) * len(table.columns), *table.rows]
    lines = ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in rows]
    more = [f"\n{table.left_out} more rows"] if table.left_out else []
    return "\n".join([*lines, *more])


def _markdown_cell(cell: object) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|").replace("\n", " ")


def _summary_record(time_s: float, step: int, summary: bytes) -> bytes:
    return _record(
        struct.pack("<Bd", 0x09, time_s) + b"\x10" + _varint(step) + b"\x2a" + _sized(summary)
    )


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a message with its length."""
    return bytes((number << 3 | 2,)) + _sized(content)


@functools.lru_cache(maxsize=4096)
def _value_of(tag: str) -> bytes:
    """Return a `Summary.Value` up to its four bytes of data."""
    name = b"\x0a" + _sized(tag.encode()) + b"\x15"
    return b"\x0a" + _varint(len(name) + 4) + name


def _float32(value: float) -> bytes:
    if _LARGEST_FLOAT < abs(value) < math.inf:
        value = math.copysign(math.inf, value)
    return struct.pack("<f", value)


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*groups, number))


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return b"".join((length, _masked_crc(length), event, _masked_crc(event)))


def _masked_crc(content: bytes) -> bytes:
    table, crc = _crc_table(), _WORD
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= _WORD
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & _WORD)


@functools.cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return tuple(table)
