"""Lookup tables: their sharding and the transfers that they need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.time import Target
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.search.search import plan
from nbdist.records import DATA, MODEL, Plan, Planning
from nbdist.worker.planning.plan_step import plan_of
from nbdist.worker.planning.query import PlanQuery
from tests.plan_models import hardware, model_of_program, table

ROWS, COLUMNS, TOKENS = 10**6, 16, 4096
"""Shape of a table, and number of rows that a step looks up."""

LOOKED_UP_BYTES = TOKENS * COLUMNS * 4
"""Bytes of the rows that all devices together look up."""


def planned(data: int, model: int = 1, zero: int = 3) -> Plan:
    target = hardware(f"{data * model}xH100")
    return plan(table(ROWS), target, Planning(fixed={DATA: data, MODEL: model, "zero": zero}))


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
    for data, model, spec in (
        (8, 2, ((), (MODEL, DATA))),
        (16, 4, ((DATA,), (MODEL,))),
    ):
        found = planned(data, model)
        assert found.tensors[0].spec == spec
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
@pytest.mark.parametrize(("columns", "micro"), [(16, 1), (12, 1), (16, 4)])
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
    """The batch is sharded over all devices, as the network needs it, and so is the table."""
    model = model_of(*network(10**9, 64, 2**16, 1024))
    found = plan(model, hardware("8 hosts x 8 H100"), Planning())
    assert (found.axes[DATA] >= 32, found.zero) == (True, 3)
    assert any(DATA in axes for axes in found.tensors[0].spec)
    assert found.tensors[0].device_bytes == 10**9 * 64 * 4 // 64
