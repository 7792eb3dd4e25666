"""Objects of the notebook in an exported program: arrays in a file, other values as code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nbdist.errors import UsageError
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LIMIT_BYTES = 1 << 30
"""Largest size of the arrays of a program."""

FILE = "data.npz"
_KINDS = "biufcSU"
"""Kinds of element types that a file of NumPy stores without pickling."""

_MOST_TEXT = 2000
"""Most characters of a value that is written as code."""


class JobData:
    """Arrays of a program. They are read with `source[key]`.

    Attributes:
        source: name of the open file in the program, such as `data`.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._arrays: dict[str, np.ndarray] = {}
        self._of_name: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._arrays)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def assignments(self, objects: Mapping[str, object]) -> list[str]:
        """Return statements that create the objects; their arrays are added to the file.

        Raises:
            UsageError: an object is no array, number or text, or the arrays exceed the limit.
        """
        lines = []
        for name, value in objects.items():
            before = self.size_bytes
            lines.append(f"{name} = {self._code(name, name, value)}")
            self._of_name[name] = self.size_bytes - before
        if self.size_bytes > LIMIT_BYTES:
            largest = max(self._of_name, key=lambda name: self._of_name[name])
            raise UsageError(
                f"cannot export `{largest}`: it was copied from the notebook, the data have "
                f"{formatting.size(self.size_bytes)}, and the limit is "
                f"{formatting.size(LIMIT_BYTES)}: read it from a file in a %%dist_run cell"
            )
        return lines

    def write(self, path: Path) -> None:
        """Write the arrays to a file, without compression."""
        with path.open("wb") as file:
            np.savez(file, **self._arrays)  # type: ignore[arg-type]

    def _code(self, name: str, key: str, value: object) -> str:
        """Return an expression for a value; `key` is the name of its array in the file."""
        match value:
            case np.ndarray() if value.dtype.kind in _KINDS and type(value) is np.ndarray:
                return f'{self.source}["{self._added(key, value)}"]'
            case np.generic() if value.dtype.kind in _KINDS:
                return f'{self.source}["{self._added(key, np.asarray(value))}"][()]'
            case tuple() | list() if type(value) in (tuple, list):
                parts = [self._code(name, f"{key}_{i}", part) for i, part in enumerate(value)]
                text = ", ".join(parts)
                if isinstance(value, list):
                    return self._short(name, value, f"[{text}]")
                return self._short(name, value, f"({text}{',' * (len(parts) == 1)})")
            case dict() if type(value) is dict and all(type(word) is str for word in value):
                items = (
                    f"{word!r}: {self._code(name, f'{key}_{i}', part)}"
                    for i, (word, part) in enumerate(value.items())
                )
                return self._short(name, value, f"{{{', '.join(items)}}}")
            case float() if type(value) is float and not math.isfinite(value):
                return f'float("{value}")'
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return self._short(name, value, repr(value))
        raise UsageError(_refusal(name, value))

    def _short(self, name: str, value: object, code: str) -> str:
        if len(code) > _MOST_TEXT:
            raise UsageError(_refusal(name, value))
        return code

    def _added(self, key: str, array: np.ndarray) -> str:
        """Add an array; a key that is in use gets a number."""
        free, number = key, 2
        while free in self._arrays:
            free, number = f"{key}_{number}", number + 1
        self._arrays[free] = array
        return free


def _refusal(name: str, value: object) -> str:
    return (
        f"cannot export `{name}` ({type(value).__name__}), which was copied from the notebook: "
        "only NumPy arrays, numbers and short texts can be; convert it to arrays, or create it in "
        "a %%dist_run cell"
    )
