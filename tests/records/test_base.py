"""Rows of results."""

from __future__ import annotations

import pytest

from nbdist.errors import RowKeyError
from nbdist.records.base import ResultRow


class Row(ResultRow, frozen=True):
    """A row with two fields."""

    rank: int
    host: str = "a"

    @property
    def label(self) -> str:
        return f"{self.rank}@{self.host}"


def test_a_row_is_a_mapping_of_its_fields() -> None:
    assert dict(Row(rank=2)) == {"rank": 2, "host": "a"}


@pytest.mark.parametrize("name", ["label", "size", "keys", ""])
def test_other_names_are_no_fields(name: str) -> None:
    with pytest.raises(RowKeyError) as refused:
        _ = Row(rank=2)[name]
    assert str(refused.value) == f"{name!r} is no field: fields are rank, host"
