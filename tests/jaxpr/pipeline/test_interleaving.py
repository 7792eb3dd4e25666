"""Interleaved stages (several blocks of layers each): results equal to the original step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given, settings

from nbdist.errors import PlanError
from nbdist.jaxpr.pipeline.build import as_pipeline
from nbdist.records import Staging
from tests.jaxpr.pipeline.test_build import assert_same_in_stages, stacked, training
from tests.jaxpr.pipeline.test_one_f_one_b import beside_rows, params_and_batch_beside_rows, through
from tests.jaxpr.pipeline.test_stages import run_on_eight_devices
from tests.jaxpr.test_microbatches import rows_of
from tests.jaxpr.test_remat import (
    ROWS,
    WIDTH,
    block,
    params_and_batch,
    plain_loss,
    scanned,
    second_loss,
    step_of,
    traced,
)

if TYPE_CHECKING:
    from nbdist.records import Remat, Schedule

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
ONE_SCHEDULE = pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.full), "1f1b"]
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "rounds", "turns", "per"),
    [(2, 3, 1, 2), pytest.param(4, 2, 2, 1, marks=pytest.mark.full)],
)
def test_interleaving_gives_the_results_of_one_stage(
    schedule: Schedule, stages: int, rounds: int, turns: int, per: int
) -> None:
    """Include more rounds than stages, several turns, and several layers of a block."""
    assert_same_for_sizes(schedule, stages, rounds, turns, per)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=4, deadline=None)
@given(
    stages=st.integers(2, 4),
    rounds=st.integers(2, 3),
    turns=st.integers(1, 3),
    per=st.integers(1, 2),
)
def test_interleaving_of_any_sizes_gives_the_same_results(
    schedule: Schedule, stages: int, rounds: int, turns: int, per: int
) -> None:
    assert_same_for_sizes(schedule, stages, rounds, turns, per)


def assert_same_for_sizes(
    schedule: Schedule, stages: int, rounds: int, turns: int, per: int
) -> None:
    rows = rows_of(2, 2 * turns * stages, 3, 5)
    step = training(lambda params, x: (through(params, x), None, 0.0))
    own = stacked(stages * rounds * per), (rows[0], rows[1])
    assert_same_in_stages(step, *own, stages, turns * stages, "", Staging(schedule, rounds))


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("gpipe", "selective"),
        ("1f1b", "full"),
        pytest.param("gpipe", "full", marks=pytest.mark.full),
        pytest.param("1f1b", "selective", marks=pytest.mark.full),
    ],
)
def test_remat_with_interleaving_gives_the_same_results(schedule: Schedule, remat: Remat) -> None:
    assert_same_in_stages(step_of(scanned), *params_and_batch(), 3, 6, remat, Staging(schedule, 2))


@pytest.mark.full  # `test_one_f_one_b.py` tests the same without interleaving
@ONE_SCHEDULE
def test_layers_carry_keys_sums_and_shared_weights(schedule: Schedule) -> None:
    assert_same_in_stages(
        beside_rows, *params_and_batch_beside_rows(8), 2, 4, "", Staging(schedule, 2)
    )
    assert_same_in_stages(
        beside_rows, *params_and_batch_beside_rows(8), 2, 8, "full", Staging(schedule, 4)
    )


def test_stacked_layer_results_without_gradients() -> None:
    def step(params: Any, batch: Any) -> Any:
        out, each = jax.lax.scan(lambda x, p: (block(x, p), x), batch[0], params)
        return out, each, each.mean((1, 2))

    rows = rows_of(2, 8, 5)
    assert_same_in_stages(step, stacked(12), (rows[0], rows[1]), 2, 4, "", Staging("gpipe", 3))


@ONE_SCHEDULE
def test_transformer_trains_as_in_one_stage(schedule: Schedule) -> None:
    name = "tied transformer"
    loss = second_loss(name, "full", 8, 2, Staging(schedule, 2))
    assert loss == pytest.approx(plain_loss(name), rel=1e-5)


@pytest.mark.processes
@ONE_SCHEDULE
def test_each_block_and_its_gradient_is_sent_once(schedule: Schedule) -> None:
    """One message per block; within ticks only neighbours send, and no parameter moves."""
    found = run_on_eight_devices(
        f"""
        SCHEDULE, ROUNDS = "{schedule}", 2
        pattern = r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\\(.*op_name=(.*)"
        found = []
        for shapes, kind, name in re.findall(pattern, on((2, 2, 2), "full").as_text()):
            for shape in re.findall(r"\\w+(\\[[\\d,]*\\])", shapes):
                found.append((kind, json.loads(shape), "/while/" in name))
        print(json.dumps(found))
        """
    )
    block = sorted([[2, WIDTH, 2 * WIDTH], [2, 2 * WIDTH, WIDTH]] * 2 * 2)
    outside = [
        shape for kind, shape, within in found if kind == "collective-permute" and not within
    ]
    assert sorted(outside) == block
    part = ROWS // 4 // 2 * WIDTH  # elements of a microbatch on one device of a stage
    within = {
        math.prod(shape) for kind, shape, is_within in found if is_within and kind != "all-gather"
    }
    assert within == {part}


@pytest.mark.parametrize("rows", [8, 6])
def test_last_batch_may_have_fewer_rows(rows: int) -> None:
    """Six rows do not divide into turns of four microbatches."""
    step = training(lambda params, x: (through(params, x), None, 0.0))
    own = rows_of(2, rows, 5)
    assert_same_in_stages(step, stacked(8), (own[0], own[1]), 4, 8, "", Staging("gpipe", 2))


def test_indivisible_sizes_are_refused() -> None:
    step = training(lambda params, x: (through(params, x), None, 0.0))
    rows = rows_of(2, 12, 5)
    closed, inputs = traced(step, stacked(8), (rows[0], rows[1]))
    with pytest.raises(PlanError, match="multiple of the 4 stages as micro, not 6: use 4 or 8"):
        as_pipeline(closed, inputs, 4, 6, Staging("gpipe", 2))
    with pytest.raises(PlanError, match="8 layers do not divide into 4 stages x 3 rounds"):
        as_pipeline(closed, inputs, 4, 4, Staging("gpipe", 3))
