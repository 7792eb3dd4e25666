"""Small numbers that stand for values: they are compared in their place."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


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
    return of_arrays((array,))


def of_arrays(arrays: Iterable[Any]) -> int:
    """CRC-32 of all arrays or tensors; 0 if there is none."""
    total = 0
    for array in map(np.asarray, arrays):
        if array.dtype.hasobject:  # texts of TensorFlow are such
            content: Any = repr(array.tolist()).encode()
        else:
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        total = zlib.crc32(content, total)
    return _signed(total)


def of_facts(facts: Mapping[str, object]) -> Iterator[Digest]:
    """Of numbers, texts and the like, by their names."""
    for name, value in facts.items():
        yield Digest(name, _signed(zlib.crc32(repr(value).encode())))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
