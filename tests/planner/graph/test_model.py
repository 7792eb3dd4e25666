"""Models of steps: sizes of values, operations in loops, rows of the batch, tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.planner.graph.model import Model, Op, Tensor, tables_of
from tests.planner.steps import (
    BACKWARD_SCAN,
    COLUMN,
    ENTRY,
    FORWARD_SCAN,
    FOUND,
    ID,
    IDS,
    LINEAR,
    LOOKUP,
    LOSS,
    ROWS,
    SCAN,
    TABLE,
    table_step,
    value,
)


def test_value_has_bytes_of_all_elements() -> None:
    assert (value(0, (3, 5), (0, 1)).size, value(0, (3, 5), (0, 1)).nbytes) == (15, 60)
    assert value(0, (3, 5), (0, 1), "bfloat16").nbytes == 30
    assert value(0, (), ()).nbytes == 4


@pytest.mark.parametrize(
    ("dtype", "is_inexact"),
    [("float32", True), ("bfloat16", True), ("complex64", True), ("int32", False), ("bool", False)],
)
def test_only_real_and_complex_numbers_are_inexact(dtype: str, is_inexact: bool) -> None:
    assert replace(value(0, (2,), (0,)), dtype=dtype).is_inexact is is_inexact


def test_operations_of_a_loop_follow_it() -> None:
    inner = Op("loop", "inner", (), (), body=(LOSS,))
    outer = Op("loop", "outer", (), (), body=(inner, LOOKUP))
    model = replace(SCAN, ops=(outer, FORWARD_SCAN))
    names = [op.name for op in model.every_op]
    assert names == ["outer", "inner", "loss", "gather", "scan", "mul"]


def batches(*sizes: tuple[int, ...]) -> Model:
    """Return a model whose batch has arrays of these shapes, each with groups of its own."""
    inputs = [value(n, shape, tuple(range(n, n + len(shape)))) for n, shape in enumerate(sizes)]
    tensors = tuple(Tensor(f"x{v.number}", "batch", v) for v in inputs)
    return Model(tensors=tensors, groups=(), ops=())


def test_rows_are_the_first_dimension_of_the_batch() -> None:
    assert LINEAR.batch_groups == {ROWS}
    assert LINEAR.rows == 32
    assert batches((8, 3), ()).batch_groups == {0}
    assert (batches((8, 3), (16,)).rows, batches((8, 3), (16,)).batch_groups) == (16, {0, 1})


def test_batch_without_dimensions_has_one_row() -> None:
    for model in (batches(()), batches()):
        assert model.rows == 1
        assert not model.batch_groups
    one = Model(tensors=(Tensor("x", "batch", value(0, (1, 3), (-1, 0))),), groups=(), ops=())
    assert not one.batch_groups


def test_table_is_looked_up_along_its_rows() -> None:
    (found,) = tables_of(table_step()).items()
    assert found == ((ENTRY, COLUMN), (frozenset({ENTRY}), True))


def test_table_in_a_product_with_the_batch_is_not_alone() -> None:
    product = Op("dot", "dot_general", (FOUND, TABLE), (value(9, (32, 256), (ID, ENTRY)),))
    assert not tables_of(table_step(product))[ENTRY, COLUMN].is_alone
    without_batch = Op("dot", "dot_general", (TABLE, TABLE), (value(9, (256,), (ENTRY,)),))
    assert tables_of(table_step(without_batch))[ENTRY, COLUMN].is_alone
    columns_only = Op("dot", "dot_general", (FOUND,), (value(9, (32, 64), (ID, COLUMN)),))
    assert tables_of(table_step(columns_only))[ENTRY, COLUMN].is_alone


def test_look_ups_in_a_loop_count() -> None:
    model = table_step()
    loop = Op("loop", "scan", (TABLE, IDS), (FOUND,), body=(LOOKUP,), times=2)
    assert tables_of(replace(model, ops=(loop,)))[ENTRY, COLUMN].rows == {ENTRY}


def test_other_arrays_are_no_tables() -> None:
    model = table_step()
    read = (Tensor("table", "read", TABLE), model.tensors[1])
    assert not tables_of(replace(model, tensors=read))
    every_dimension = replace(LOOKUP, summed=(ENTRY, COLUMN))
    assert not tables_of(replace(model, ops=(every_dimension,)))
    narrow = value(0, (256, 1), (ENTRY, -1))
    column = replace(LOOKUP, ins=(narrow, IDS))
    tensors = (Tensor("table", "carried", narrow), model.tensors[1])
    assert not tables_of(replace(model, tensors=tensors, ops=(column,)))
    assert not tables_of(replace(SCAN, ops=(FORWARD_SCAN, BACKWARD_SCAN)))
