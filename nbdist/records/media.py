"""Histograms, images, tables and texts that cells report."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.records.base import Record

MediaKind = Literal["histogram", "image", "table", "text"]


class Histogram(msgspec.Struct, frozen=True, kw_only=True, tag="histogram"):
    """Distribution of the values of an array.

    Attributes:
        edges: edges of the bins, ascending, one more than `counts`.
        counts: number of values in each bin.
        size: number of finite values.
        mean: mean of the finite values.
        deviation: their standard deviation.
        not_finite: number of values that are NaN or infinite. They are in no bin.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    size: int
    mean: float
    deviation: float
    not_finite: int = 0


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """An image.

    Attributes:
        width: width in pixels.
        height: height in pixels.
        png: content of a PNG file.
    """

    width: int
    height: int
    png: bytes


class DataTable(msgspec.Struct, frozen=True, kw_only=True, tag="table"):
    """A table.

    Attributes:
        columns: names of the columns.
        rows: rows with a cell for each column.
        left_out: number of further rows that were not stored.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | bool | None, ...], ...]
    left_out: int = 0


class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A text."""

    text: str


AnyMedia = Histogram | Image | DataTable | Text


class MediaEntry(Record, frozen=True):
    """Line of the index of a run's media.

    Attributes:
        number: position in the index, from 0.
        kind: kind of its content.
        name: name that the user chose.
        rank: rank that reported it.
        epoch: epoch of the report; -1 for none.
        step: step of the report; -1 for none.
        time_s: seconds of the run.
        offset: position of the content in its file, in bytes.
        size: length of the content in bytes. Equal contents may share a position.
    """

    number: int
    kind: MediaKind
    name: str
    rank: int
    epoch: int
    step: int
    time_s: float
    offset: int
    size: int


def media_kind(content: AnyMedia) -> MediaKind:
    """Return the kind of a content."""
    kind: MediaKind = type(content).__struct_config__.tag  # type: ignore[assignment]
    return kind
