"""Results that are sequences of rows, with a representation for notebooks."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from nbdist.errors import RowKeyError, UsageError
from nbdist.views.surface import bundle

if TYPE_CHECKING:
    from collections.abc import Hashable

    import pandas as pd

    from nbdist.records import MimeBundle

RowT = TypeVar("RowT")

_NAMED_KEYS = 12
"""Number of keys that an error lists."""


class ResultTable(Sequence[RowT], ABC, Generic[RowT]):
    """An immutable sequence of rows.

    Index it by position, slice or key, iterate over its rows and compare it with `==`. Convert it
    by `list(table)` (rows), `dict(table)` (rows by key), `dict(table[0])` (fields of one row) and
    `table.to_dataframe()`.
    """

    __array_ufunc__ = None  # NumPy: `array == table` compares by the table, not by its elements

    @property
    @abstractmethod
    def rows(self) -> tuple[RowT, ...]:
        """All rows, in order."""

    @abstractmethod
    def html(self) -> str:
        """Return the representation for a notebook."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the representation for a terminal."""

    def keys(self) -> tuple[Any, ...]:
        """Return the keys of all rows: names if rows have names, else positions."""
        return tuple(self._key(index, row) for index, row in enumerate(self.rows))

    def to_dataframe(self) -> pd.DataFrame:
        """Return a `pandas.DataFrame` with one line per row and one column per field.

        Raises:
            UsageError: pandas is not installed.
        """
        require_pandas()
        import pandas as pd

        return pd.DataFrame([self._fields(row) for row in self.rows], columns=self._columns())

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, chosen: int | str) -> RowT: ...
    @overload
    def __getitem__(self, chosen: slice) -> Sequence[RowT]: ...
    def __getitem__(self, chosen: int | str | slice) -> RowT | Sequence[RowT]:
        """Return the row at a position or with a key, or the rows of a slice.

        Raises:
            IndexError: no row has this position.
            RowKeyError: no row has this key. The message lists the first keys.
        """
        if not isinstance(chosen, str):
            return self.rows[chosen]
        keys = self.keys()
        if chosen not in keys:
            more = ["..."] if len(keys) > _NAMED_KEYS else []
            known = ", ".join([*map(repr, keys[:_NAMED_KEYS]), *more]) or "none"
            raise RowKeyError(
                f"{chosen!r} is not a key of these {len(self)} rows: keys are {known}"
            )
        return self.rows[keys.index(chosen)]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_mimebundle_(
        self, **_: object
    ) -> MimeBundle | tuple[MimeBundle, dict[str, dict[str, object]]]:
        return bundle(self)

    def _key(self, index: int, row: RowT) -> Hashable:
        """Return the key of a row."""
        return index

    def _fields(self, row: RowT) -> dict[str, object]:
        """Return the columns of a row of the data frame."""
        return dict(row)  # type: ignore[call-overload, no-any-return]  # a `Row`, or overridden

    @abstractmethod
    def _columns(self) -> list[str]:
        """Return the names of the columns of the data frame."""


def require_pandas() -> None:
    """Raise UsageError if pandas is not installed."""
    if importlib.util.find_spec("pandas") is None:
        raise UsageError("to_dataframe needs pandas: run %pip install pandas")
