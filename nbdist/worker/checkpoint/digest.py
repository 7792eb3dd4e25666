"""Small numbers that stand for values: they are compared in their place."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

WHOLE_BYTES = 2**20
"""The size above which an array is sampled; one of 1 MiB takes a millisecond."""

_CHUNKS = 16

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
            content: Any = repr([_comparable(item) for item in array.ravel().tolist()]).encode()
        else:
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        total = zlib.crc32(content, total)
    return _signed(total)


def _comparable(item: Any) -> Any:
    """Texts and numbers; of other objects the type: their texts may contain an address."""
    return item if isinstance(item, (str, bytes, int, float, complex)) else type(item).__name__


def of_sample(parts: Iterable[np.ndarray]) -> int:
    """CRC-32 of the chunks of one array, one after the other."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).data, crc)
    return _signed(crc)


def chunks(size: int, item_bytes: int) -> list[slice]:
    """Ranges of `WHOLE_BYTES` in all, spread from the first to the last value.

    Args:
        size: the number of values of a flat array above `WHOLE_BYTES`.
        item_bytes: the size of a value.
    """
    length = WHOLE_BYTES // _CHUNKS // item_bytes
    return [
        slice(start, start + length) for start in np.linspace(0, size - length, _CHUNKS, dtype=int)
    ]


def of_keys(groups: Mapping[int, Iterable[int]]) -> int:
    """CRC-32 of numbers by group, in whichever order they are."""
    return _signed(zlib.crc32(repr(sorted((key, sorted(g)) for key, g in groups.items())).encode()))


def of_facts(facts: Mapping[str, object]) -> Iterator[Digest]:
    """Of numbers, texts and the like, by their names."""
    for name, value in facts.items():
        yield Digest(name, _signed(zlib.crc32(repr(value).encode())))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
