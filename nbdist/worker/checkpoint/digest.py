"""Digests: small numbers that are compared instead of values."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

WHOLE_BYTES = 2**20
"""Size in bytes above which an array is sampled. One MiB takes a millisecond."""

_CHUNKS = 16

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Digest(msgspec.Struct, frozen=True):
    """Digest of a value.

    Attributes:
        name: name of the value in the user's terms.
        number: int32 checksum of the value.
    """

    name: str
    number: int


def of_array(array: np.ndarray) -> int:
    """Return the CRC-32. It detects every change within 32 consecutive bits."""
    return of_arrays((array,))


def of_arrays(arrays: Iterable[Any]) -> int:
    """Return the CRC-32 of all arrays or tensors; 0 if there is none."""
    total = 0
    for array in map(np.asarray, arrays):
        if array.dtype.hasobject:  # for example strings of TensorFlow
            content: Any = repr([_comparable(item) for item in array.ravel().tolist()]).encode()
        else:
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        total = zlib.crc32(content, total)
    return _signed(total)


def _comparable(item: Any) -> Any:
    """Return strings and numbers as they are, else the type: a repr may contain an address."""
    return item if isinstance(item, (str, bytes, int, float, complex)) else type(item).__name__


def of_sample(parts: Iterable[np.ndarray]) -> int:
    """Return the CRC-32 of consecutive chunks of one array."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).data, crc)
    return _signed(crc)


def chunks(size: int, item_bytes: int) -> list[slice]:
    """Return slices of `WHOLE_BYTES` in total, spread from the first to the last value.

    Args:
        size: number of values of a flat array larger than `WHOLE_BYTES`.
        item_bytes: size of a value in bytes.
    """
    length = WHOLE_BYTES // _CHUNKS // item_bytes
    return [
        slice(start, start + length) for start in np.linspace(0, size - length, _CHUNKS, dtype=int)
    ]


def of_keys(groups: Mapping[int, Iterable[int]]) -> int:
    """Return the CRC-32 of numbers by group, independent of their order."""
    return _signed(zlib.crc32(repr(sorted((key, sorted(g)) for key, g in groups.items())).encode()))


def of_facts(facts: Mapping[str, object]) -> Iterator[Digest]:
    """Yield the digests of numbers, strings and similar values, by their names."""
    for name, value in facts.items():
        yield Digest(name, _signed(zlib.crc32(repr(value).encode())))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
