"""Ticks of a pipeline: items of stages, and rows and layers by ticks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.jaxpr.flatten import inner_equations
from nbdist.jaxpr.microbatches import Rows
from nbdist.jaxpr.pipeline.schedule import (
    Schedule,
    StageRows,
    chosen,
    constrains_axis,
    of_stage,
    parts_of,
    row_axes,
)
from nbdist.records import DATA, STAGE

VAR: Any = "rows"
"""Key of an array whose first dimension is rows."""

COLUMNS: Any = "columns"
"""Key of an array whose second dimension is rows."""


def schedule(micro: int, stages: int, rounds: int = 1, parts: int = 1, each: int = 1) -> Schedule:
    """Return a schedule of microbatches with `each` rows in each part."""
    rows = Rows({VAR: (0,), COLUMNS: (1,)}, micro * parts * each, micro * parts)
    return Schedule(rows, stages, parts, rounds)


@pytest.mark.parametrize(
    ("micro", "stages", "rounds", "ticks"),
    [(4, 3, 1, 6), (6, 3, 2, 14), (3, 3, 3, 11), (1, 1, 1, 1)],
)
def test_numbers_of_a_schedule(micro: int, stages: int, rounds: int, ticks: int) -> None:
    made = schedule(micro, stages, rounds, parts=2)
    assert (made.micro, made.ticks, made.items) == (micro, ticks, rounds * micro)
    assert made.warmup_ticks == rounds * stages - 1


TICKS = np.arange(9)
"""Ticks of every test, so that JAX compiles each operation once."""


def items(made: Schedule, *, is_late: bool = False) -> list[list[tuple[int, int] | None]]:
    """Return microbatch and round of both stages in each tick; None for an idle stage."""
    found = made.items_of_tick(TICKS[:, None], is_late=is_late)
    every = zip(*map(np.asarray, (found.micro, found.round, found.is_working)), strict=True)
    return [
        [(int(m), int(r)) if works else None for m, r, works in zip(*tick, strict=True)]
        for tick in every
    ][: made.ticks + 1]


def test_stages_start_one_after_another() -> None:
    assert items(schedule(3, 2)) == [
        [(0, 0), None],
        [(1, 0), (0, 0)],
        [(2, 0), (1, 0)],
        [None, (2, 0)],
        [None, None],
    ]


def test_last_stage_starts_the_backward_pass() -> None:
    assert items(schedule(3, 2), is_late=True) == [
        [None, (0, 0)],
        [(0, 0), (1, 0)],
        [(1, 0), (2, 0)],
        [(2, 0), None],
        [None, None],
    ]


def test_groups_of_microbatches_run_through_all_rounds() -> None:
    first = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    found = items(schedule(4, 2, 2))
    assert [tick[0] for tick in found] == [*first, None]
    assert [tick[1] for tick in found] == [None, *first]
    late = items(schedule(4, 2, 2), is_late=True)
    assert [tick[1] for tick in late] == [*((m, 1 - r) for m, r in first), None]


def test_single_stage_has_the_items_of_its_column() -> None:
    made = schedule(3, 2)
    for is_late in (False, True):
        whole = made.items_of_tick(TICKS[:, None], is_late=is_late)
        for stage in range(2):
            one = made.items_of_tick(TICKS[:, None], stage=stage, is_late=is_late)
            for own, every in zip(one, whole, strict=True):
                assert np.array_equal(own[:, 0], every[:, stage])


@pytest.mark.parametrize("rounds", [1, 2])
def test_forward_tick_is_that_of_the_same_item(rounds: int) -> None:
    made = schedule(4, 2, rounds)
    forward, backward = items(made), items(made, is_late=True)
    late = made.items_of_tick(TICKS[:, None], is_late=True)
    for own, ticks in zip(backward, np.asarray(made.forward_ticks(late)), strict=False):
        for stage, item in enumerate(own):
            assert item is None or forward[ticks[stage]][stage] == item


def test_microbatch_takes_every_kth_row_of_a_part() -> None:
    """Two parts are consecutive rows, on two devices."""
    made = schedule(3, 1, parts=2, each=2)
    found = made.divided(np.arange(12), VAR)
    assert found.tolist() == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]
    assert made.joined(found, VAR).tolist() == list(range(12))


def test_rows_in_another_dimension_and_beside_others() -> None:
    """The second dimension is 4 rows by 2 elements, merged."""
    made = schedule(2, 1, parts=2)
    array = np.arange(3 * 8).reshape(3, 8)
    found = made.divided(array, COLUMNS)
    assert found.shape == (2, 2, 3, 2)
    assert found[1, 0, 0].tolist() == [2, 3]
    assert found[0, 1, 0].tolist() == [4, 5]
    assert np.array_equal(made.joined(found, COLUMNS), array)


def test_rows_of_each_stage_by_tick() -> None:
    made = schedule(3, 2)
    run = jax.jit(lambda rows: made.feed_by_tick(rows, VAR, is_late=False))
    found = np.asarray(run(np.arange(10, 13)))
    assert found.shape == (4, 2, 1, 1)
    working = [[None if i is None else 10 + i[0] for i in tick] for tick in items(made)]
    for tick, own in zip(found[..., 0, 0].tolist(), working[:4], strict=True):
        assert all(x is None or x == y for x, y in zip(own, tick, strict=True))


@pytest.mark.parametrize("rounds", [1, 2])
def test_stacks_by_tick_return_to_their_layers(rounds: int) -> None:
    """A stack has the layers first, in the order of stages and rounds."""
    made = schedule(4, 2, rounds, parts=2)
    stack = np.arange(4 * 8).reshape(4, 8)  # layers, rows

    @jax.jit
    def both(stack: Any) -> Any:
        skewed = made.skewed(made.interleaved(stack, is_sharded=False), COLUMNS, is_late=False)
        return skewed.array, made.unskewed(skewed, COLUMNS, 8)

    skewed, back = map(np.asarray, both(stack))
    assert skewed.shape == (made.ticks, 2, 2, 4 // 2 // rounds, 1)
    assert np.array_equal(back, stack)
    first = skewed[0, 0, 0, :, 0]
    assert first.tolist() == stack[: 4 // 2 // rounds, 0].tolist()


def test_layers_are_split_by_stages() -> None:
    made = schedule(2, 2)
    assert made.by_stages(np.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made.by_stages(np.zeros((3, 6, 2)), 1).shape == (3, 2, 3, 2)


def test_rows_outside_of_a_mesh_are_not_constrained() -> None:
    made = schedule(2, 2)
    array = np.zeros((2, 2))
    assert made.sharded(array) is array
    assert made.entering(np.arange(2), VAR).shape == (2, 1, 1)
    assert made.leaving(StageRows(np.zeros((2, 1, 1, 1)), 0), VAR).shape == (2,)


def specs(function: Any, *args: Any, data: int = 2) -> list[Any]:
    """Return the specs of the constraints of a function over a mesh with stages."""
    mesh = jax.sharding.AbstractMesh(
        (2, data), (STAGE, DATA), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(function)(*args).jaxpr
    every = [*program.eqns, *inner_equations(program)]
    return [
        eqn.params["sharding"].spec for eqn in every if eqn.primitive.name == "sharding_constraint"
    ]


OPEN = jax.P.UNCONSTRAINED


def test_stages_and_parts_are_constrained() -> None:
    for parts, own in ((2, DATA), (1, OPEN)):
        made = schedule(2, 2, parts=parts)
        array = np.zeros((3, 2, parts, 5))
        assert specs(lambda x, made=made: made.sharded(x, 1), array) == [
            jax.P(OPEN, STAGE, own, OPEN)
        ]
    without = schedule(2, 2, parts=2)
    assert specs(lambda x: without.sharded(x, 0, parts=False), np.zeros((2, 5))) == [
        jax.P(STAGE, OPEN)
    ]


def test_entering_rows_are_sharded_over_data() -> None:
    """If microbatches do not divide into parts, their rows may divide over the data axis."""
    for parts, each, expected in (
        (2, 1, jax.P(None, DATA, None)),
        (1, 4, jax.P(None, None, DATA)),
        (1, 3, jax.P(None, None, None)),
    ):
        made = schedule(2, 2, parts=parts, each=each)
        array = np.zeros(made.rows.batch)
        assert specs(lambda x, made=made: made.entering(x, VAR), array) == [expected]


def test_leaving_rows_are_sharded_over_data_and_stages() -> None:
    made = schedule(2, 2, parts=2)
    assert specs(lambda x: made.leaving(StageRows(x, 1), VAR), np.zeros((2, 2, 2, 1))) == [
        jax.P((DATA, STAGE))
    ]
    odd = schedule(3, 2)
    array = np.zeros((3, 1, 1, 1))
    assert specs(lambda x: odd.leaving(StageRows(x, 1), VAR), array, data=2) == [jax.P(OPEN)]


def test_leaving_rows_are_those_of_their_stage() -> None:
    made = schedule(2, 2)
    rows = StageRows(np.arange(1, 5, dtype=np.float32).reshape(2, 2, 1, 1), 1)
    assert made.leaving(rows, VAR).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("rows", "sizes", "axes"),
    [
        (8, {DATA: 2, STAGE: 4}, (DATA, STAGE)),
        (4, {DATA: 2, STAGE: 4}, (DATA,)),
        (3, {DATA: 2, STAGE: 3}, ()),
        (8, {STAGE: 4}, (STAGE,)),
        (8, {}, ()),
    ],
)
def test_mesh_axes_that_divide_rows(
    rows: int, sizes: dict[str, int], axes: tuple[str, ...]
) -> None:
    assert row_axes(rows, sizes) == axes


def test_microbatches_have_as_many_parts_as_the_data_axis() -> None:
    assert parts_of(8, 2) == 1
    mesh = jax.sharding.AbstractMesh((4,), (DATA,), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert [parts_of(batch, 2) for batch in (8, 16, 4, 12)] == [4, 4, 1, 1]


def test_constraints_of_an_axis_are_found() -> None:
    mesh = jax.make_mesh((4, 2), (STAGE, DATA), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def constrained(x: Any) -> Any:
        @jax.jit
        def inner(x: Any) -> Any:
            return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(None, DATA)))

        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.lax.with_sharding_constraint(jnp.sin(inner(x)), one)

    program = jax.make_jaxpr(constrained)(np.zeros((4, 2))).jaxpr
    (within,) = list(inner_equations(program))
    found = {name: constrains_axis(within, name) for name in (STAGE, DATA)}
    assert found == {STAGE: False, DATA: True}
    last = program.eqns[-1]
    assert constrains_axis(last, STAGE)  # it may do so
    assert not constrains_axis(program.eqns[-2], STAGE)


def test_each_stage_gets_its_choice() -> None:
    flags = np.array([True, False])
    made = jax.jit(chosen)(flags, np.ones((2, 2, 3)), np.zeros((2, 2, 3)))
    assert np.asarray(made).sum((1, 2)).tolist() == [6, 0]


@pytest.mark.parametrize("dim", [0, 1])
def test_part_of_one_stage_keeps_its_type(dim: int) -> None:
    array = np.moveaxis(np.arange(6, dtype=np.int8).reshape(3, 2), 0, dim)
    found = jax.jit(lambda array: of_stage(array, 2, dim))(array)
    assert found.tolist() == [4, 5]
    assert found.dtype == np.int8
