"""Stages that do not divide the layers: results equal to the original step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from nbdist.errors import PlanError
from nbdist.jaxpr.pipeline.build import as_pipeline
from nbdist.jaxpr.pipeline.uneven_stages import padded, real_layers, unpadded
from nbdist.records import Staging
from tests.jaxpr.pipeline.test_build import assert_same_in_stages, stacked, training
from tests.jaxpr.pipeline.test_interleaving import ONE_SCHEDULE, SCHEDULES
from tests.jaxpr.pipeline.test_one_f_one_b import beside_rows, params_and_batch_beside_rows, through
from tests.jaxpr.pipeline.test_stages import run_on_eight_devices
from tests.jaxpr.test_microbatches import rows_of
from tests.jaxpr.test_remat import ROWS, WIDTH, block, traced

if TYPE_CHECKING:
    from nbdist.records import Remat, Schedule

TRAINING = training(lambda params, x: (through(params, x), None, 0.0))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [4, 5, 6, 7, 10])
def test_stages_differ_by_one_layer_at_most(layers: int, stages: int) -> None:
    sizes = real_layers(layers, stages).sum(1)
    assert sizes.sum() == layers
    assert sizes.max() - sizes.min() <= 1


def test_padded_layers_repeat_the_layer_before() -> None:
    made = padded(np.arange(10), 4, is_sent=False)
    assert made.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 9]
    assert unpadded(made, 10, 4, is_sent=False).tolist() == list(range(10))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("layers", "stages", "micro"),
    [(10, 4, 6), (3, 2, 1), pytest.param(7, 3, 2, marks=pytest.mark.full)],
)
def test_uneven_stages_give_the_results_of_one_stage(
    schedule: Schedule, layers: int, stages: int, micro: int
) -> None:
    assert_same_for_sizes(schedule, layers, stages, micro)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=5, deadline=None)
@given(sizes=st.integers(2, 4).flatmap(lambda s: st.tuples(st.just(s), st.integers(s, 11))))
def test_any_number_of_layers_gives_the_same_results(
    schedule: Schedule, sizes: tuple[int, int]
) -> None:
    stages, layers = sizes
    assert_same_for_sizes(schedule, layers, stages, 3)


def assert_same_for_sizes(schedule: Schedule, layers: int, stages: int, micro: int) -> None:
    rows = rows_of(2, 2 * micro, 3, 5)
    own = stacked(layers), (rows[0], rows[1])
    assert_same_in_stages(TRAINING, *own, stages, micro, "", Staging(schedule))


@ONE_SCHEDULE
@pytest.mark.parametrize("remat", ["", pytest.param("full", marks=pytest.mark.full)])
def test_layers_carry_keys_sums_and_shared_weights(schedule: Schedule, remat: Remat) -> None:
    """A place without a layer adds nothing to a sum that layers carry."""
    given = params_and_batch_beside_rows(7)
    assert_same_in_stages(beside_rows, *given, 4, 4, remat, Staging(schedule))


@ONE_SCHEDULE
def test_last_stage_computes_the_loss(schedule: Schedule) -> None:
    rows = rows_of(2, 8, 3, 5)
    own = stacked(5), (rows[0], rows[1])
    assert_same_in_stages(TRAINING, *own, 4, 4, "", Staging(schedule, 1, "last"))


def test_stacked_layer_results_without_gradients() -> None:
    def step(params: Any, batch: Any) -> Any:
        out, each = jax.lax.scan(lambda x, p: (block(x, p), x), batch[0], params)
        return out, each, each.mean((1, 2))

    rows = rows_of(2, 8, 5)
    assert_same_in_stages(step, stacked(5), (rows[0], rows[1]), 2, 4)


def test_two_scans_of_different_lengths() -> None:
    """Four stages divide the layers of the first scan only."""

    def forward(params: Any, x: Any) -> Any:
        first, second = params
        return through(second, through(first, x)), None, 0.0

    rows = rows_of(2, 8, 5)
    params = stacked(4), stacked(6)
    assert_same_in_stages(training(forward), params, (rows[0], rows[1]), 4, 4)


def test_layers_that_are_not_finite_on_other_values() -> None:
    """A padded place computes a layer twice; its infinities and NaN reach no result."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out, _ = jax.lax.scan(lambda x, p: (jnp.log(x) * p, None), batch, params)
            return out.mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, params - 0.1 * grads

    params, batch = np.float32([[3.0], [10.0], [-1.0]]), np.full((4, 1), 1.5, np.float32)
    wanted, _ = jax.jit(step)(params, batch)
    assert wanted < 0  # so that the last layer, computed twice, gives NaN
    for schedule in SCHEDULES:
        assert_same_in_stages(step, params, batch, 2, 2, "", Staging(schedule))


def test_stages_without_layers_and_uneven_blocks_are_refused() -> None:
    rows = rows_of(2, 12, 5)
    closed, inputs = traced(TRAINING, stacked(3), (rows[0], rows[1]))
    with pytest.raises(PlanError, match="3 layers are too few for 4 stages: use 3 stages or fewer"):
        as_pipeline(closed, inputs, 4, 4)
    with pytest.raises(PlanError, match="3 layers do not divide into 2 stages x 2 rounds"):
        as_pipeline(closed, inputs, 2, 4, Staging("gpipe", 2))


@pytest.mark.processes
@ONE_SCHEDULE
def test_stages_exchange_layers_and_gradients_once(schedule: Schedule) -> None:
    """Stages store each stack by another dimension, and no parameter moves within ticks."""
    found = run_on_eight_devices(
        f"""
        SCHEDULE, LAYERS = "{schedule}", 10
        params = dict(up=normal(LAYERS, WIDTH, 4 * WIDTH), down=normal(LAYERS, 4 * WIDTH, WIDTH))
        wanted = jax.jit(step)(params, batch)
        SPECS = dict(up=P(None, None, "stage"), down=P(None, "stage"))
        pattern = r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\\(.*op_name=(.*)"
        found = []
        for shapes, kind, name in re.findall(pattern, on((4, 2, 1), "full").as_text()):
            for shape in re.findall(r"\\w+(\\[[\\d,]*\\])", shapes):
                found.append((kind, json.loads(shape), "/while/" in name))
        print(json.dumps(found))
        """
    )
    within = [(kind, math.prod(shape)) for kind, shape, is_within in found if is_within]
    part = ROWS // 4 // 2 * WIDTH  # elements of a microbatch on one device of a stage
    assert {size for _, size in within} <= {part}
    assert "all-to-all" not in {kind for kind, _ in within}
    sent = [math.prod(shape) for kind, shape, _ in found if kind == "all-to-all"]
    stack = 3 * 4 * WIDTH * WIDTH  # three layers of one stage, in parts from all stages
    assert sum(sent) == 4 * stack  # two stacks and their gradients
    gathered = [math.prod(shape) for kind, shape, _ in found if kind == "all-gather"]
    assert all(size < stack / 4 for size in gathered)


@pytest.mark.processes
def test_stages_and_tensor_parallelism_share_dimensions() -> None:
    """All four devices of a stage and of the model axis share 128, only two share 38."""
    run_on_eight_devices(
        """
        LAYERS = 5
        up, down = P(None, None, ("stage", "model")), P(None, ("stage", "model"))
        def layer(x, p):
            return p["gain"] * block(x, p) + x @ p["beside"]["up"] @ p["beside"]["down"], None
        params = dict(
            up=normal(LAYERS, WIDTH, 4 * WIDTH), down=normal(LAYERS, 4 * WIDTH, WIDTH),
            gain=1 + normal(LAYERS, 1)[:, 0] / 9,
            beside=dict(up=normal(LAYERS, WIDTH, 38) / 9, down=normal(LAYERS, 38, WIDTH) / 9),
        )
        wanted = jax.jit(step)(params, batch)
        SPECS = dict(up=up, down=down, gain=P())
        SPECS["beside"] = dict(up=P(None, None, "model"), down=P(None, "model"))
        for SCHEDULE in ("gpipe", "1f1b"):
            on((2, 2, 2))
        print(0)
        """
    )
