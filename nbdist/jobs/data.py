"""Objects of the notebook in an exported program.

Short values are code. Arrays are in one file, and each long text, vocabulary or table is in a file
of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import UsageError
from nbdist.jobs.pushed_objects import FrameworkArray, Opaque
from nbdist.jobs.tables import Table, table_of
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LIMIT_BYTES = 1 << 30
"""Largest size of the data of a program."""

FILE = "data.npz"

_MOST_TEXT = 2000
"""Most characters of a value that is written as code."""

_MOST_BITS = 4 * _MOST_TEXT - 12
"""Most bits of an integer, whose code is hexadecimal."""

_MOST_DECIMAL_BITS = 64

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = ({int}, {float}, {complex})


class JobData:
    """Data of a program, in files beside it.

    Args:
        source: name of the open file of arrays in the program, such as `data`.
        folder: expression of the folder of the files in the program.
        module: returns the name of an imported package in the program, and lets it import it.

    Attributes:
        source: see above.
        arrays: arrays in `FILE`, by key.
    """

    def __init__(self, source: str, folder: str, module: Callable[[str], str]) -> None:
        self.source = source
        self.arrays: dict[str, np.ndarray] = {}
        self._folder = folder
        self._module = module
        self._contents: dict[str, bytes] = {}
        self._tables: dict[str, Table] = {}
        self._of_name: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.arrays or self._contents or self._tables)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        tables = sum(table.size_bytes for table in self._tables.values())
        return arrays + tables + sum(map(len, self._contents.values()))

    def assignments(self, objects: Mapping[str, object]) -> list[str]:
        """Return statements that create the objects; their data are added to the files.

        Raises:
            UsageError: objects cannot be stored, or the data exceed the limit.
        """
        lines, faults, known = [], [], dict(self._tables)
        for name, value in objects.items():
            before = self.size_bytes
            try:
                lines.append(f"{name} = {self._code(name, name, value)}")
            except UsageError as error:
                faults.append(str(error))
            self._of_name[f"`{name}` ({_kind(value)})"] = self.size_bytes - before
        if faults:
            raise UsageError("\n".join(faults))
        if self.size_bytes > LIMIT_BYTES:
            largest = max(self._of_name, key=self._of_name.__getitem__)
            raise UsageError(
                f"cannot export {largest}: it was copied from the notebook, the data have "
                f"{formatting.size(self.size_bytes)}, and the limit is "
                f"{formatting.size(LIMIT_BYTES)}: read it from a file in a %%dist_run cell"
            )
        added = [table for file, table in self._tables.items() if file not in known]
        changed = [(table.label, text) for table in added if (text := table.difference())]
        if changed:
            raise UsageError(
                "\n".join(
                    f"cannot export {label}: a file changes the table ({text}): change it in the "
                    "notebook and copy it again, or create it in a %%dist_run cell"
                    for label, text in changed
                )
            )
        return lines

    def write(self, folder: Path) -> None:
        """Write the files to a folder. Arrays are not compressed."""
        if self.arrays:
            with (folder / FILE).open("wb") as file:
                np.savez(file, **self.arrays)  # type: ignore[arg-type]
        for name, content in self._contents.items():
            (folder / name).write_bytes(content)
        for name, table in self._tables.items():
            table.write(folder / name)

    # Code.

    def _code(self, place: str, key: str, value: object) -> str:
        """Return an expression for a value.

        Args:
            place: the value in messages, such as `config['rate']`.
            key: name of its array or file.
            value: the value.
        """
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._array(place, key, value)
        if type(value) is FrameworkArray:
            return self._framework_array(place, key, value)
        if type(value) in (list, tuple, dict):
            return self._container(place, key, value)
        if type(value) in _PLAIN:
            text = _literal(place, value)
            return text if len(text) <= _MOST_TEXT else self._long(place, key, value)
        if isinstance(value, Opaque):
            raise _refusal(place, value)
        try:
            table = table_of(value)
        except (UsageError, ValueError) as error:
            raise UsageError(f"cannot export `{place}` ({_kind(value)}): {error}") from None
        if table is None:
            raise _refusal(place, value)
        name = self._free_file(key, table.suffix)
        self._tables[name] = table
        table.label = f"`{place}` ({_kind(value)})"
        modules = {module: self._module(module) for module in table.modules}
        return table.reader.format(path=f'{self._folder} / "{name}"', **modules)

    def _array(self, place: str, key: str, value: np.ndarray | np.generic) -> str:
        array = np.asarray(value)
        if array.dtype == object and isinstance(value, np.ndarray):
            parts = array.ravel().tolist()
            if all(type(part) in _PLAIN for part in parts):
                listed = self._code(place, key, parts)
                shape = "" if array.ndim == 1 else f".reshape({array.shape})"
                return f"{self._module('numpy')}.array({listed}, dtype=object){shape}"
        if array.dtype.hasobject or array.dtype.kind == "T":
            raise _refusal(place, value)
        end = "[()]" if isinstance(value, np.generic) else ""
        if array.dtype.kind == "V" and array.dtype.fields is None:  # bfloat16 and float8
            package, name = type(array.dtype.type(0)).__module__, array.dtype.name
            if package != "ml_dtypes":
                raise _refusal(place, value)
            end = f".view({self._module(package)}.{name}){end}"
            array = array.view(f"u{array.dtype.itemsize}")
        return f'{self.source}["{self._added(key, array)}"]{end}'

    def _framework_array(self, place: str, key: str, value: FrameworkArray) -> str:
        values = value.values
        if value.framework == "tensorflow":
            return f"{self._module('tensorflow')}.constant({self._code(place, key, values)})"
        jax = self._module("jax")
        if not value.is_weak:
            return f"{jax}.numpy.asarray({self._code(place, key, values)})"
        if values.size == 0 or not (values == values.flat[0]).all():
            raise UsageError(
                f"cannot export `{place}` (jax.Array): its type is weak, which no file contains: "
                "copy jax.numpy.asarray(x, x.dtype) of it"
            )
        return f"{jax}.numpy.full({values.shape}, {values.flat[0].item()!r})"

    def _container(self, place: str, key: str, value: Any) -> str:
        code = self._short_code(place, key, value)
        return self._long(place, key, value) if code is None else code

    def _short_code(self, place: str, key: str, value: Any) -> str | None:
        """Return a container as code; None if it is too long."""
        if len(value) > _MOST_TEXT // 3:
            return None
        keys = list(value) if isinstance(value, dict) else range(len(value))
        arrays, contents, tables = dict(self.arrays), dict(self._contents), dict(self._tables)
        parts = [
            self._code(f"{place}[{word!r}]", f"{key}_{i}", value[word])
            for i, word in enumerate(keys)
        ]
        if isinstance(value, dict):
            words = [self._code(place, key, word) for word in keys]
            code = f"{{{', '.join(map(': '.join, zip(words, parts, strict=True)))}}}"
        elif isinstance(value, list):
            code = f"[{', '.join(parts)}]"
        else:
            code = f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if len(code) <= _MOST_TEXT:
            return code
        self.arrays, self._contents, self._tables = arrays, contents, tables
        return None

    def _long(self, place: str, key: str, value: Any) -> str:
        """Return an expression that reads a long value from a file."""
        if isinstance(value, bytes):
            return f'({self._folder} / "{self._stored(key, ".bin", value)}").read_bytes()'
        if isinstance(value, str):
            with contextlib.suppress(UnicodeEncodeError):
                file = self._stored(key, ".txt", value.encode())
                return f'({self._folder} / "{file}").read_bytes().decode()'
        if isinstance(value, list) and {type(part) for part in value} in _NUMBERS:
            array = np.asarray(value)
            if array.dtype.kind in "ifc":  # not integers of more than 64 bits
                return f'{self.source}["{self._added(key, array)}"].tolist()'
        if _is_json(value):
            file = self._stored(key, ".json", json.dumps(value, indent=1).encode())
            return f'{self._module("json")}.loads(({self._folder} / "{file}").read_text())'
        if isinstance(value, tuple):
            return f"tuple({self._code(place, key, list(value))})"
        if isinstance(value, dict):
            parts = (list(value), list(value.values()))
            return f"dict(zip({self._columns(place, key, parts)}))"
        if isinstance(value, list):
            return self._long_list(place, key, value)
        raise _refusal(place, value)

    def _long_list(self, place: str, key: str, value: list[Any]) -> str:
        kinds = {type(part) for part in value}
        if kinds in ({np.ndarray}, {bytes}):
            end = ".tobytes()" if kinds == {bytes} else ""
            parts = [np.frombuffer(p, np.uint8) if end else p for p in value]
            codes = [self._array(place, f"{key}_{i}", part) for i, part in enumerate(parts)]
            if codes == [f'{self.source}["{key}_{i}"]' for i in range(len(value))]:
                return f'[{self.source}[f"{key}_{{i}}"]{end} for i in range({len(value)})]'
        if kinds == {tuple}:
            sizes = {len(part) for part in value}
            if len(sizes) == 1 and 0 not in sizes:
                columns = [list(column) for column in zip(*value, strict=True)]
                return f"list(zip({self._columns(place, key, columns)}))"
        raise _refusal(place, value)

    def _columns(self, place: str, key: str, columns: Sequence[list[Any]]) -> str:
        return ", ".join(
            self._code(place, f"{key}_{i}", column) for i, column in enumerate(columns)
        )

    # Files.

    def _added(self, key: str, array: np.ndarray) -> str:
        """Add an array; a key that is in use gets a number."""
        free, number = key, 2
        while free in self.arrays:
            free, number = f"{key}_{number}", number + 1
        self.arrays[free] = array
        return free

    def _stored(self, key: str, suffix: str, content: bytes) -> str:
        name = self._free_file(key, suffix)
        self._contents[name] = content
        return name

    def _free_file(self, key: str, suffix: str) -> str:
        free, number = f"data_{key}{suffix}", 2
        while free in self._contents or free in self._tables:
            free, number = f"data_{key}_{number}{suffix}", number + 1
        return free


def _is_json(value: object) -> bool:
    """Return True if JSON restores a value exactly."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(word) is str for word in value) and all(map(_is_json, value.values()))
    return type(value) in (str, int, float, bool, type(None))


def _kind(value: object) -> str:
    """Return the name of a value's type for messages."""
    if isinstance(value, Opaque):
        return value.__name__
    if isinstance(value, FrameworkArray):
        return "jax.Array" if value.framework == "jax" else "tf.Tensor"
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("builtins", "numpy") else f"{package}.{kind.__name__}"


def _literal(place: str, value: object) -> str:
    """Return the code of a number, a text, bytes or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({_literal(place, value.real)}, {_literal(place, value.imag)})"
    if isinstance(value, int) and value.bit_length() > _MOST_DECIMAL_BITS:
        if value.bit_length() > _MOST_BITS:
            raise _refusal(place, value)
        return hex(value)
    return repr(value)


def _refusal(place: str, value: object) -> UsageError:
    return UsageError(
        f"cannot export `{place}` ({_kind(value)}), which was copied from the notebook: arrays, "
        "tables, numbers, texts, and lists and dicts of them can be exported; convert it to these, "
        "or create it in a %%dist_run cell"
    )
