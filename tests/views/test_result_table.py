"""Results of magics without workers: rows, keys and data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import RowKeyError, UsageError
from nbdist.records import DeviceState, Examination, HostFacts, Trouble
from nbdist.views.cluster.devices import DevicesPicture
from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture
from nbdist.views.plan.picture import PlanPicture
from nbdist.views.trace import TracePicture
from tests.plans import by_hand, tensor
from tests.views.cluster.test_workers import worker
from tests.views.test_trace import TRACE

if TYPE_CHECKING:
    from nbdist.views.result_table import ResultTable

FACTS = HostFacts(
    rank=0,
    host="a",
    python="/usr/bin/python",
    versions={"python": "3.11"},
    folder="/home",
    cpus=4,
    free_bytes=1,
    disk_bytes=1,
    shm_bytes=1,
    gpus=(),
    driver="",
    time_s=0.0,
)
TROUBLE = Trouble(where="a", what="the disk is full", advice="delete files")


def device(rank: int, name: str) -> DeviceState:
    return DeviceState(name=name, platform="gpu", kind="x", process=rank, host="a", plugin="p")


def devices(*found: DeviceState) -> DevicesPicture:
    return DevicesPicture(found, None, "", None)


TABLES: list[tuple[ResultTable[Any], list[Any]]] = [
    (devices(device(0, "gpu:0"), device(1, "gpu:1")), ["gpu:0", "gpu:1"]),
    (devices(device(0, "gpu:0"), device(1, "gpu:0")), ["0/gpu:0", "1/gpu:0"]),
    (HostsPicture((FACTS,), ("10.0.0.1",), (("HOME",),), ("ssh",)), [0]),
    (DoctorPicture(Examination(facts=(FACTS,), troubles=(TROUBLE,))), [0]),
    (TracePicture(TRACE), [0, 1]),
    (PlanPicture(by_hand(tensor("w", 8, 4), tensor("p['b']", 8))), ["w", "p['b']"]),
]


@pytest.mark.parametrize(("table", "keys"), TABLES, ids=lambda value: type(value).__name__)
def test_rows_are_indexed_iterated_and_converted(table: ResultTable[Any], keys: list[Any]) -> None:
    rows = list(table)
    assert len(table) == len(keys)
    assert [table[index] for index in range(len(table))] == rows
    assert list(table[:1]) == rows[:1]
    assert dict(table) == dict(zip(keys, rows, strict=True))
    assert rows[0] in table
    assert table.index(rows[-1]) == len(rows) - 1
    assert list(reversed(table)) == rows[::-1]
    frame = table.to_dataframe()
    assert len(frame) == len(rows)
    assert set(dict(rows[0])) >= set(frame.columns) - {"version"}
    with pytest.raises(IndexError):
        _ = table[len(table)]
    with pytest.raises(RowKeyError, match=r"^'nothing' is not a key of these"):
        _ = table["nothing"]


@pytest.mark.parametrize(("table", "keys"), TABLES[:-1], ids=lambda value: type(value).__name__)
def test_tables_are_compared(table: ResultTable[Any], keys: list[Any]) -> None:
    others = [other for other, _ in TABLES if other is not table]
    assert table == table
    assert all(table != other for other in others)
    assert table != list(table)


def test_a_table_without_rows_has_columns() -> None:
    table = DoctorPicture(Examination(facts=(FACTS,)))
    assert not table
    assert list(table.to_dataframe().columns) == ["where", "what", "advice", "is_fatal"]
    with pytest.raises(UsageError, match="these 0 rows: keys are none"):
        _ = table["a"]


def test_only_some_of_many_keys_are_listed() -> None:
    table = devices(*(device(0, f"gpu:{number}") for number in range(20)))
    with pytest.raises(RowKeyError, match=r"'gpu:11', \.\.\.$"):
        _ = table["gpu:20"]


def test_a_row_is_a_mapping_of_its_fields() -> None:
    row = worker(3)
    assert dict(row)["rank"] == 3
    assert {**row}["host"] == "a"
    with pytest.raises(KeyError, match=r"^'size' is no field: fields are rank, host"):
        _ = row["size"]
