"""Scalars as TensorBoard reads them: TFRecords of `Event` messages.

Source: `RecordWriter` in tensorflow/core/lib/io/record_writer.h, and event.proto and summary.proto
of tensorboard/compat/proto. The writers there are bring protobuf and NumPy, half a second of
imports, for the two messages that are made here.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_VERSION = b"brain.Event:2"
_LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
_CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, its bits reversed
_WORD = 0xFFFFFFFF


def first_record() -> bytes:
    """What every file begins with."""
    return _record(struct.pack("<Bd", 0x09, 0.0) + b"\x1a" + _sized(FILE_VERSION))


def scalars_record(time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Scalars of one step.

    Args:
        time_s: when, in seconds since 1970.
        step: 0 or more.
        values: by tag; kept as float32, so that larger ones become infinite.
    """
    summary = b"".join(_value_of(tag) + _float32(value) for tag, value in values.items())
    return _record(
        struct.pack("<Bd", 0x09, time_s) + b"\x10" + _varint(step) + b"\x2a" + _sized(summary)
    )


@functools.lru_cache(maxsize=4096)
def _value_of(tag: str) -> bytes:
    """A `Summary.Value` up to its four bytes."""
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
