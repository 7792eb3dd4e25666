"""Layouts: parts of values, specs of a step's inputs, and transfers for sharded tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.time import Target
from nbdist.planner.graph.layout import Exchange, Layout, ShardedModel, split_by
from nbdist.planner.graph.model import Group, Model, Op, Tensor
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, STAGE, Plan, Planning
from nbdist.worker.planning.plan_step import plan_of
from nbdist.worker.planning.query import PlanQuery
from tests import plan_models, plans
from tests.plan_models import hardware, model_of_program
from tests.planner.steps import (
    BACKWARD,
    BACKWARD_SCAN,
    DOWN,
    DOWN_DOT,
    FORWARD,
    FORWARD_SCAN,
    FOUND,
    FOUND_SLOPE,
    GRADIENT,
    IDS,
    INNER,
    INPUT,
    LINEAR,
    LOOKUP,
    LOSS,
    NEW_TABLE,
    NEW_W,
    NORM,
    OUT,
    SAVED,
    SCALE,
    SCALE_SLOPE,
    SCAN,
    SCATTER,
    SEQUENCE,
    STATES,
    TABLE,
    TABLE_SLOPE,
    UP_DOT,
    WORDS_MODEL,
    WORDS_OUT,
    M,
    W,
    X,
    Y,
    stream,
    table_step,
    value,
)
from tests.plans import TWO_HOSTS, fixed, spec

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Value
    from nbdist.records import Spec, Zero


def linear(data: int = 1, model: int = 1, zero: Zero = 0, *split: int) -> ShardedModel:
    return ShardedModel(LINEAR, Layout(data, model, frozenset(split), zero), STATES)


def scan(data: int = 1, stage: int = 1, micro: int = 1) -> ShardedModel:
    return ShardedModel(SCAN, Layout(data, 1, stage=stage, micro=micro), STATES)


def table(data: int, zero: Zero = 3, given: dict[str, Spec] | None = None) -> ShardedModel:
    return ShardedModel(table_step(), Layout(data, 1, zero=zero), frozenset(), given)


def specs(sharded: ShardedModel) -> dict[str, Spec]:
    return {tensor.path: sharded.spec(tensor) for tensor in sharded.model.tensors}


def parameter_spec(
    sizes: tuple[int, int], layout: Layout, role: str = "carried"
) -> tuple[tuple[str, ...], ...]:
    """Return the spec of a matrix with groups 0 and 1."""
    tensor = Tensor("w", role, value(0, sizes, (0, 1)))  # type: ignore[arg-type]
    model = Model((tensor,), tuple(Group(size, "") for size in sizes), ())
    return ShardedModel(model, layout, frozenset()).spec(tensor)


def test_stages_are_outermost_and_only_there_if_several() -> None:
    assert list(Layout(2, 3).axes.items()) == [(DATA, 2), (MODEL, 3)]
    assert list(Layout(2, 3, stage=4).axes.items()) == [(STAGE, 4), (DATA, 2), (MODEL, 3)]


def test_rounds_multiply_blocks_and_shorten_ticks() -> None:
    layout = Layout(1, 1, micro=8, stage=4, rounds=2)
    assert (layout.blocks, layout.ticks, layout.held) == (8, 2 * 8 + 3, 19 / 2)
    layout = replace(layout, schedule="1f1b")
    assert (layout.ticks, layout.held) == (2 * 8 + 3, 15 / 2)
    few = replace(layout, micro=2, rounds=1)
    assert (few.ticks, few.held) == (5, 5)


def test_data_shards_rows_and_model_shards_its_groups() -> None:
    assert [linear(4).parts(v) for v in (X, Y, W)] == [4, 4, 1]
    assert [linear(2, 3, 0, OUT).parts(v) for v in (X, Y, W, GRADIENT)] == [2, 6, 3, 3]
    assert linear(4).bytes_of(Y) == Y.nbytes / 4


def test_indivisible_batch_is_computed_by_every_device() -> None:
    sharded = linear(5)
    assert [sharded.parts(v) for v in (X, Y)] == [1, 1]
    assert sharded.has_rows(X)


def test_stages_shard_rows_outside_of_layers_if_they_divide() -> None:
    sharded = scan(data=2, stage=4, micro=4)
    assert sharded.by_stage_too
    assert [sharded.parts(v) for v in (INPUT, SAVED, SCALE)] == [8, 8, 4]
    whole = scan(data=32, stage=4, micro=2)
    assert not whole.by_stage_too
    assert [whole.parts(v) for v in (INPUT, SAVED, SCALE)] == [32, 32 * 4, 4]


def test_microbatch_is_sharded_over_data_and_stages_shard_its_layers() -> None:
    few = scan(data=2, stage=4, micro=4).microbatch
    assert few.is_microbatch
    assert not few.by_stage_too
    assert [few.parts(v) for v in (INPUT, SAVED, SCALE)] == [8, 8 * 4, 4]
    assert scan(data=2, stage=4, micro=4).entering_bytes(INPUT) == 4 * INPUT.nbytes / 8


@pytest.mark.parametrize(("micro", "shares", "parts"), [(4, 4, 16), (16, 4, 64), (32, 1, 32)])
def test_stages_share_rows_of_the_loss_section_if_they_divide(
    micro: int, shares: int, parts: int
) -> None:
    section = scan(stage=4, micro=micro).loss_section
    assert section.is_microbatch
    assert (section.shares, section.parts(INPUT)) == (shares, parts)


def test_only_loops_over_layers_are_staged() -> None:
    sharded = scan(stage=4, micro=4)
    assert sharded.is_staged(FORWARD_SCAN)
    assert sharded.is_staged(BACKWARD_SCAN)
    assert not sharded.is_staged(LOSS)
    assert not sharded.is_staged(replace(FORWARD_SCAN, over=(INPUT,)))
    assert not scan(data=4).is_staged(FORWARD_SCAN)


def test_sums_over_microbatches_are_at_least_float32() -> None:
    sharded = linear(2, 2, 0, OUT)
    narrow = value(9, (64, 128), W.groups, "bfloat16")
    assert sharded.summed_bytes(W) == W.nbytes / 2
    assert sharded.summed_bytes(narrow) == 2 * narrow.nbytes / 2


def test_products_are_sharded_by_their_groups_also_in_loops() -> None:
    assert linear(1, 2, 0, OUT).shards_products((FORWARD,))
    assert not linear(2, 1).shards_products((FORWARD,))
    assert not linear(1, 2, 0, 7).shards_products((FORWARD,))
    assert not linear(1, 2, 0, OUT).shards_products((stream("sub", (W, M), NEW_W),))
    assert linear(1, 2, 0, OUT).shards_products((Op("loop", "scan", (), (), body=(BACKWARD,)),))


def test_roles_separate_parameters_from_states() -> None:
    assert [linear().role(t) for t in LINEAR.tensors] == ["parameter", "state", "batch"]
    assert linear().role(replace(LINEAR.tensors[0], role="read")) == "read"


@pytest.mark.parametrize(
    ("zero", "w", "m"),
    [(0, ((), ()), ((), ())), (1, ((), ()), ((), (DATA,))), (3, ((), (DATA,)), ((), (DATA,)))],
)
def test_zero_shards_states_then_parameters(zero: Zero, w: Spec, m: Spec) -> None:
    assert specs(linear(4, 1, zero)) == {"w": w, "m": m, "x": ((DATA,), ())}


def test_data_prefers_whole_then_large_then_first_dimensions() -> None:
    columns = frozenset({1})
    assert parameter_spec((64, 128), Layout(4, 2, columns, zero=3)) == ((DATA,), (MODEL,))
    assert parameter_spec((64, 128), Layout(4, 1, zero=3)) == ((), (DATA,))
    assert parameter_spec((64, 64), Layout(4, 1, zero=3)) == ((DATA,), ())
    assert parameter_spec((9, 1024), Layout(4, 2, columns, zero=3)) == ((), (MODEL, DATA))
    assert parameter_spec((9, 1028), Layout(4, 2, columns, zero=3)) == ((), (MODEL,))
    assert parameter_spec((63, 127), Layout(4, 1, zero=3)) == ((), ())


def test_small_read_and_undivided_arrays_are_whole() -> None:
    assert parameter_spec((32, 64), Layout(4, 1, zero=3)) == ((), (DATA,))
    assert parameter_spec((32, 60), Layout(4, 1, zero=3)) == ((), ())
    assert parameter_spec((64, 128), Layout(4, 1, zero=3), "read") == ((), ())
    assert parameter_spec((64, 128), Layout(1, 1, zero=3)) == ((), ())


def test_stages_shard_layers_before_the_model_axis() -> None:
    layout = Layout(1, 2, frozenset({3}), stage=4, micro=4)
    sharded = ShardedModel(SCAN, layout, STATES)
    assert specs(sharded)["scale"] == ((STAGE,), (MODEL,))
    assert specs(ShardedModel(SCAN, replace(layout, stage=1), STATES))["scale"] == ((), (MODEL,))


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout(2, 2), ((DATA, MODEL), ())),
        (Layout(4, 1), ((DATA,), ())),
        (Layout(1, 1), ((), ())),
        (Layout(8, 8), ((), ())),
        (Layout(2, 1, stage=2), ((STAGE, DATA), ())),
    ],
)
def test_all_axes_shard_the_batch_if_they_divide_it(layout: Layout, spec: Spec) -> None:
    assert ShardedModel(LINEAR, layout, STATES).spec(LINEAR.tensors[2]) == spec


def test_scalar_of_the_batch_has_an_empty_spec() -> None:
    scalar = Tensor("rate", "batch", value(9, (), ()))
    assert linear(4).spec(scalar) == ()
    assert linear(4).device_bytes(scalar) == 4


def test_given_specs_override_the_layout() -> None:
    sharded = ShardedModel(LINEAR, Layout(4, 1), STATES, {"w": ((DATA,), ())})
    assert specs(sharded) == {"w": ((DATA,), ()), "m": ((), ()), "x": ((DATA,), ())}
    assert sharded.device_bytes(LINEAR.tensors[0]) == W.nbytes // 4
    assert specs(sharded.with_layout(Layout(2, 1)))["w"] == ((DATA,), ())


def test_unused_inputs_take_no_memory() -> None:
    unused = replace(LINEAR.tensors[0], used=False)
    assert (linear().device_bytes(unused), linear().device_bytes(LINEAR.tensors[0])) == (
        0,
        W.nbytes,
    )


@pytest.mark.parametrize(
    ("zero", "data", "gathered"), [(3, 4, ["w"]), (1, 4, []), (3, 1, []), (0, 4, [])]
)
def test_sharded_parameters_are_gathered(zero: Zero, data: int, gathered: list[str]) -> None:
    sharded = linear(data, 1, zero)
    assert [t.path for t in LINEAR.tensors if sharded.is_gathered(t)] == gathered


def test_columns_of_a_table_are_sharded_before_rows() -> None:
    """The rows are larger, and they are sharded if the columns do not divide."""
    assert specs(table(8))["table"] == ((), (DATA,))
    assert specs(table(128))["table"] == ((DATA,), ())
    assert specs(table(8, zero=0))["table"] == ((), ())
    assert not table(8).is_gathered(table(8).model.tensors[0])


def test_rows_of_a_sharded_table_are_exchanged() -> None:
    own, whole = FOUND.nbytes / 8, FOUND.nbytes
    by_rows = table(8, given={"table": ((DATA,), ())})
    for op in (LOOKUP, SCATTER):
        assert table(8).exchanged(op) == Exchange(own, is_by_rows=False)
        assert by_rows.exchanged(op) == Exchange(whole, is_by_rows=True)
        assert table(8, zero=0).exchanged(op) is None
    assert table(8).exchanged(stream("mul", (FOUND,), FOUND_SLOPE)) is None
    assert table(8).exchanged(Op("lookup", "gather", (FOUND, IDS), (FOUND_SLOPE,))) is None
    fixed = Op("lookup", "gather", (TABLE, value(9, (3,), (-1,))), (value(10, (3, 64), (-1, 1)),))
    assert table(8).exchanged(fixed) is None


def test_gradient_of_a_sharded_table_stays_sharded() -> None:
    assert table(8).is_table_gradient(TABLE_SLOPE)
    assert not table(8, zero=0).is_table_gradient(TABLE_SLOPE)
    assert not table(8).is_table_gradient(FOUND)
    product = Op("dot", "dot_general", (FOUND, TABLE), (value(9, (32, 256), (2, 0)),))
    tied = ShardedModel(table_step(product), Layout(8, 1, zero=3), frozenset())
    assert not tied.is_table_gradient(TABLE_SLOPE)
    assert tied.is_gathered(tied.model.tensors[0])


def shares(sharded: ShardedModel, op: Op, *values: Value) -> list[float]:
    """Return the number of parts of each operand of an operation."""
    return [each.nbytes / sharded.bytes_in(op, each) for each in values]


def test_update_is_sharded_like_its_state() -> None:
    update = stream("add", (M, GRADIENT), NEW_W)
    assert shares(linear(4, 1, 1), update, M, GRADIENT) == [4, 4]
    assert shares(linear(4, 1, 0), update, M, GRADIENT) == [1, 1]
    assert shares(linear(4, 1, 1), BACKWARD, X, GRADIENT) == [4, 1]


def test_look_up_reads_a_sharded_table_whole() -> None:
    assert shares(table(8), LOOKUP, TABLE) == [1]
    assert shares(table(8), SCATTER, TABLE_SLOPE) == [8]
    assert shares(table(8), stream("sub", (TABLE, TABLE_SLOPE), NEW_TABLE), TABLE) == [8]


def test_results_of_products_are_sharded_along_the_sequence() -> None:
    layout = Layout(2, 4, frozenset({2}), sequence=True)
    sharded = ShardedModel(WORDS_MODEL, layout, frozenset())
    assert sharded.sequence == {SEQUENCE}
    along = [sharded.is_sequence_sharded(value) for value in (WORDS_OUT, INNER, DOWN)]
    assert along == [True, False, False]
    assert sharded.parts(WORDS_OUT) == 8
    assert sharded.around(NORM) is sharded
    for op in (UP_DOT, DOWN_DOT):
        assert sharded.around(op).parts(WORDS_OUT) == 2
    assert sharded.around(Op("loop", "scan", (), (), body=(UP_DOT,))) is sharded
    whole = ShardedModel(WORDS_MODEL, replace(layout, sequence=False), frozenset())
    assert whole.sequence == frozenset()
    assert whole.around(UP_DOT) is whole
    assert whole.parts(WORDS_OUT) == 2


def test_specs_of_parameters_determine_the_split() -> None:
    rows: Spec = ((MODEL,), ())
    assert split_by(LINEAR, [((), (DATA, MODEL)), ((), ()), rows]) == {OUT}
    assert split_by(LINEAR, [rows]) == {1}
    assert split_by(LINEAR, [((DATA,), ()), rows]) == {1}
    assert split_by(LINEAR, []) == frozenset()


def test_gradient_of_layers_is_sharded_over_stages() -> None:
    assert scan(stage=4, micro=4).parts(SCALE_SLOPE) == 4


LAYERS = 8


def test_stages_shard_only_layers_and_their_state() -> None:
    found = plans.piped(stage=4, data=2, micro=8)
    assert found.axes == {STAGE: 4, DATA: 2, MODEL: 1}
    assert list(found.axes) == [STAGE, DATA, MODEL]
    for name in ("params", "moments"):
        assert spec(found, f"{name}['layers']['up']") == ((STAGE,), (), ())
        assert spec(found, f"{name}['layers']['b']") == ((STAGE,), ())
        assert spec(found, f"{name}['head']") == ((), ())
    assert spec(found, "x") == ((STAGE, DATA), ())
    assert found.title == "data 2 x 4 stages, 8 microbatches"
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found


def test_stages_that_do_not_divide_the_layers_shard_another_dimension() -> None:
    """This is the largest one that they divide, together with the model axis."""
    model = plans.stacked(10)
    found = plan(model, hardware("8xH100"), fixed(stage=4, data=2, micro=8))
    for name in ("params", "moments"):
        assert spec(found, f"{name}['layers']['up']") == ((), (), (STAGE,))
        assert spec(found, f"{name}['layers']['b']") == ((), (STAGE,))
        assert spec(found, f"{name}['layers']['down']") == ((), (STAGE,), ())
        assert spec(found, f"{name}['head']") == ((), ())
    wide = plans.stacked(10, 4096, 4096)
    both = plan(wide, hardware("8xH100"), fixed(stage=4, model=2, data=1, micro=8))
    assert spec(both, "params['layers']['up']") == ((), (), (STAGE, MODEL))


def test_stage_stores_a_stack_as_a_whole_if_it_divides_no_dimension() -> None:
    layout = Layout(1, 1, stage=3, micro=3)
    assert specs(ShardedModel(SCAN, layout, STATES))["scale"] == ((), ())
    split = replace(layout, stage=5, model=64, split=frozenset({3}))
    assert specs(ShardedModel(SCAN, split, STATES))["scale"] == ((), (MODEL,))


def test_stages_have_room_for_the_layers_of_the_largest() -> None:
    """Eight layers, in three stages of three."""
    sharded = scan(stage=3, micro=4)
    assert sharded.is_uneven(SCALE_SLOPE)
    assert sharded.bytes_of(SCALE_SLOPE) == SCALE_SLOPE.nbytes * 3 / 8
    assert not scan(stage=4, micro=4).is_uneven(SCALE_SLOPE)
    assert not sharded.is_uneven(INPUT)


def test_zero_shards_state_within_each_stage() -> None:
    found = plans.piped(stage=2, data=4, micro=4, zero=1)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), ())
    assert spec(found, "moments['layers']['up']") == ((STAGE,), (), (DATA,))


def test_stages_combine_with_tensor_parallelism() -> None:
    planning = fixed(stage=2, data=2, model=2, micro=4)
    found = plan(plans.stacked(LAYERS, 1024, 2048), hardware(TWO_HOSTS), planning)
    assert spec(found, "params['layers']['up']") == ((STAGE,), (), (MODEL,))
    assert spec(found, "params['layers']['down']") == ((STAGE,), (MODEL,), ())


@given(
    stage=st.sampled_from([2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([2, 4, 8]),
)
def test_stages_divide_the_bytes_of_layers(stage: int, data: int, micro: int) -> None:
    model = plans.stacked()
    layout = Layout(data, 1, micro=micro, stage=stage)
    staged, whole = (
        ShardedModel(model, one, states_of(model)) for one in (layout, Layout(data, 1))
    )
    for tensor in model.tensors:
        parts = stage if "layers" in tensor.path or tensor.role == "batch" else 1
        assert staged.device_bytes(tensor) * parts == whole.device_bytes(tensor)


ROWS, COLUMNS, TOKENS = 10**6, 16, 4096
"""Shape of a table, and number of rows that a step looks up."""


LOOKED_UP_BYTES = TOKENS * COLUMNS * 4
"""Bytes of the rows that all devices together look up."""


def planned(data: int, model: int = 1, zero: int = 3) -> Plan:
    target = hardware(f"{data * model}xH100")
    return plan(
        plan_models.table(ROWS), target, Planning(fixed={DATA: data, MODEL: model, "zero": zero})
    )


def data_bytes_sent(found: Plan) -> float:
    return sum(traffic.bytes for traffic in found.time.traffic if traffic.axis == DATA)


def test_columns_are_sharded_and_rows_exchanged() -> None:
    found = planned(8)
    assert found.tensors[0].spec == ((), (DATA,))
    # Rows are sent in the forward pass, gradients in the backward pass.
    assert data_bytes_sent(found) == pytest.approx(2 * LOOKED_UP_BYTES / 8, rel=0.01)
    assert found.memory.gradients < 1.1 * ROWS * COLUMNS * 4 / 8
    whole = planned(8, zero=1)
    assert data_bytes_sent(whole) == pytest.approx(ROWS * COLUMNS * 4, rel=0.01)
    assert found.time.step < whole.time.step / 2


def test_rows_are_sharded_if_devices_outnumber_columns() -> None:
    found = planned(64)
    assert found.tensors[0].spec == ((DATA,), ())
    assert data_bytes_sent(found) == pytest.approx(2 * LOOKED_UP_BYTES, rel=0.01)
    assert found.memory.activations > LOOKED_UP_BYTES


def test_both_axes_shard_one_table() -> None:
    for data, model, expected in (
        (8, 2, ((), (MODEL, DATA))),
        (16, 4, ((DATA,), (MODEL,))),
    ):
        found = planned(data, model)
        assert found.tensors[0].spec == expected
        assert found.tensors[0].device_bytes == ROWS * COLUMNS * 4 / (data * model)


@pytest.mark.parametrize(("name", "is_alone"), [("transformer", True), ("tied transformer", False)])
def test_only_tables_outside_products_are_alone(name: str, is_alone: bool) -> None:
    model = model_of_program(name)
    ((groups, found),) = model.tables.items()
    assert (found.rows, found.is_alone) == ({groups[0]}, is_alone)


def test_models_without_lookups_have_no_tables() -> None:
    for name in ("MLP", "CNN", "U-Net"):
        assert not model_of_program(name).tables


def network(rows: int, columns: int, batch: int, wide: int) -> tuple[Any, Any]:
    """Return the jaxpr and inputs of a network that reads rows of a table."""

    def step(params: Any, ids: Any) -> Any:
        def loss_of(params: Any) -> Any:
            found = params["table"][ids].reshape(len(ids), -1)
            return jnp.mean(jax.nn.relu(found @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    params = {"table": shape(rows, columns), "w": shape(4 * columns, wide)}
    inputs = [("params['table']", "carried"), ("params['w']", "carried"), ("ids", "batch")]
    return jax.make_jaxpr(step)(params, shape(batch, 4, dtype=jnp.int32)), inputs


@pytest.mark.processes
@pytest.mark.parametrize(
    ("columns", "micro"),
    [(16, 1), *(pytest.param(*own, marks=pytest.mark.full) for own in ((12, 1), (16, 4)))],
)
def test_xla_sends_the_planned_bytes(columns: int, micro: int) -> None:
    """Twelve columns do not divide over 8 devices. Microbatches add to a sharded gradient."""
    topology = parse("8xCPU")
    target = Target(topology, calibration_of(topology.chip))
    planning = Planning(verify=True, fixed={DATA: 8, "zero": 3, "micro": micro})
    found = plan_of(PlanQuery(*network(80_000, columns, 1024, 64), target, planning))
    assert found.verified is not None
    assert found.verified.arguments == found.memory.arguments
    kinds = {one.kind: one.bytes for one in found.verified.collectives}
    own, whole = 1024 * 4 * columns * 4, 80_000 * columns * 4
    if columns == 16:
        assert kinds["all-to-all"] == 2 * own // 8 // micro  # a loop body counts once
    else:
        assert kinds["all-gather"] >= own
    assert sum(kinds.values()) < whole / 4
    assert found.verified.temporaries < whole / 2
    expected = found.memory.total - found.memory.margin
    assert 0.6 < expected / found.verified.total < 1.4


def test_batch_is_sharded_for_network_beside_large_table() -> None:
    """The batch is sharded over most devices, as the network needs it, and the table over all."""
    model = model_of(*network(10**9, 64, 2**16, 1024))
    found = plan(model, hardware("8 hosts x 8 H100"), Planning())
    assert (found.axes[DATA] >= 16, found.zero) == (True, 3)
    assert any(DATA in axes for axes in found.tensors[0].spec)
    assert found.tensors[0].device_bytes == 10**9 * 64 * 4 // 64
