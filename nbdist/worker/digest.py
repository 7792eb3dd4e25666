"""Small numbers that stand for values: they are compared in their place."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Digest(msgspec.Struct, frozen=True):
    """What stands for a value.

    Attributes:
        name: of the value, as the user knows it.
        number: an int32; another one if a single bit of the value is another.
    """

    name: str
    number: int


def of_array(array: np.ndarray) -> int:
    """CRC-32, which finds every change of up to 32 bits in a row."""
    return _signed(zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data))


def of_facts(facts: Mapping[str, object]) -> Iterator[Digest]:
    """Of numbers, texts and the like, by their names."""
    for name, value in facts.items():
        yield Digest(name, _signed(zlib.crc32(repr(value).encode())))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
