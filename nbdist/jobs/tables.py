"""Tables of the notebook as files of a program: pandas, polars, Arrow and Hugging Face datasets.

nbdist reads each Arrow file again before it writes the program. A table that the file would change
is refused with the difference. Datasets are stored by their own library and are not read again.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class Table(ABC):
    """A table as a file.

    Attributes:
        suffix: end of the name of the file.
        modules: packages that the program needs to read it.
        reader: expression that reads it, with the fields `path` and one for each package.
        size_bytes: size of the table, and about that of the file.
        label: the table in messages.
    """

    suffix: ClassVar[str] = ".arrow"
    modules: ClassVar[tuple[str, ...]]
    reader: str
    size_bytes: int
    label: str = ""

    @abstractmethod
    def difference(self) -> str:
        """Return what the file would change, or the error of its format; empty if nothing."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write the file, after `difference`.

        Raises:
            OSError: the disk is full, for example.
            UsageError: the package cannot write the table.
        """


def table_of(value: object) -> Table | None:
    """Return a table as a file; None for other objects.

    Raises:
        ValueError: no file can contain it. The message is the reason.
        UsageError: a package is missing.
    """
    match type(value).__module__.partition(".")[0], type(value).__name__:
        case "pandas", "DataFrame" | "Series":
            return _PandasTable(value)
        case "pyarrow", "Table":
            return _ArrowTable(value)
        case "polars", "DataFrame":
            return _PolarsTable(value)
        case "datasets", "Dataset" | "DatasetDict":
            return _Dataset(value)
    return None


class _ArrowTable(Table):
    """Table of pyarrow."""

    modules = ("pyarrow",)

    def __init__(self, value: Any) -> None:
        self.reader = "{pyarrow}.ipc.open_file(({path}).read_bytes()).read_all()"
        self.size_bytes = value.nbytes
        self._value = value
        self._content: Any = b""

    def difference(self) -> str:
        import pyarrow as pa

        try:
            self._content = _arrow_file(self._value)
        except pa.ArrowException as error:
            return str(error)
        restored = pa.ipc.open_file(self._content).read_all()
        is_equal = restored.equals(self._value, check_metadata=True) or (  # NaN is not equal to NaN
            restored.schema.equals(self._value.schema, check_metadata=True)
            and _arrow_file(restored).equals(self._content)
        )
        return "" if is_equal else "its values or types"

    def write(self, path: Path) -> None:
        path.write_bytes(self._content)


class _PandasTable(Table):
    """Data frame or series of pandas."""

    modules = ("pandas", "pyarrow")

    def __init__(self, value: Any) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            raise UsageError(
                "its file needs pyarrow, which is not installed: run %pip install pyarrow"
            ) from None
        self._value = value
        self._is_series = type(value).__name__ == "Series"
        frame = value.to_frame("values") if self._is_series else value
        self.reader = "{pandas}.read_feather({path})"
        if self._is_series:
            if not isinstance(value.name, (str, int, type(None))):
                raise ValueError(f"its name {value.name!r} is no text or number")
            self.reader += f'["values"].rename({value.name!r})'
        try:
            self._table = pa.Table.from_pandas(frame, preserve_index=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ValueError("; ".join(map(str, error.args))) from None
        self.size_bytes = self._table.nbytes
        self._content: Any = b""

    def difference(self) -> str:
        import pandas as pd
        import pyarrow as pa

        self._content = _arrow_file(self._table)
        restored = pd.read_feather(pa.BufferReader(self._content))
        try:
            if self._is_series:
                restored = restored["values"].rename(self._value.name)
                pd.testing.assert_series_equal(restored, self._value, check_exact=True)
            else:
                pd.testing.assert_frame_equal(restored, self._value, check_exact=True)
        except AssertionError as error:
            text = " ".join(str(error).split())
            return text.replace("[left]", "[file]").replace("[right]", "[notebook]")
        return "" if restored.attrs == self._value.attrs else "its attrs"

    def write(self, path: Path) -> None:
        path.write_bytes(self._content)


class _PolarsTable(Table):
    """Data frame of polars."""

    modules = ("polars",)

    def __init__(self, value: Any) -> None:
        self.reader = "{polars}.read_ipc({path})"
        self.size_bytes = value.estimated_size()
        self._value = value
        self._content = b""

    def difference(self) -> str:
        import polars as pl

        try:
            self._content = self._value.write_ipc(None).getvalue()
        except pl.exceptions.PolarsError as error:
            return str(error)
        restored = pl.read_ipc(io.BytesIO(self._content))
        equal = restored.schema == self._value.schema and restored.equals(self._value)
        return "" if equal else "its values or types"

    def write(self, path: Path) -> None:
        path.write_bytes(self._content)


class _Dataset(Table):
    """Dataset of Hugging Face, or a dict of them. It becomes a folder."""

    suffix = ".dataset"
    modules = ("datasets",)

    def __init__(self, value: Any) -> None:
        self.reader = "{datasets}.load_from_disk({path})"
        self._value = value
        self._parts = list(value.values()) if isinstance(value, dict) else [value]
        self.size_bytes = sum(map(_bytes_of_dataset, self._parts))

    def difference(self) -> str:
        if any(part.format["type"] == "custom" for part in self._parts):
            return "its transform is a function, which is lost"
        return ""

    def write(self, path: Path) -> None:
        import datasets
        import pyarrow as pa

        hidden = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            self._value.save_to_disk(str(path))
        except (pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            raise UsageError(f"cannot export {self.label}: {error}") from None
        finally:
            if not hidden:
                datasets.enable_progress_bars()


def _bytes_of_dataset(dataset: Any) -> int:
    """Return the size of the selected rows of a dataset."""
    rows = dataset.data.num_rows
    return int(dataset.data.nbytes * len(dataset) / rows) if rows else 0


def _arrow_file(table: Any) -> Any:
    """Return a table of pyarrow as the content of an Arrow file."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
