"""Plan on live devices: shardings of arrays and the layout that constrains a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.records import Plan, PlannedMemory, PlannedTensor, PlannedTime
from nbdist.worker.data.batches import Batch
from nbdist.worker.planning.sharding import (
    Lowered,
    is_over,
    is_sharded,
    mesh_layout_of,
    spec_of,
)


def plan_of(*tensors: tuple[str, Any], zero: Any = 0, **axes: int) -> Plan:
    return Plan(
        axes={"data": 1, **axes},
        zero=zero,
        rows=4,
        on="1xCPU",
        tensors=tuple(
            PlannedTensor(
                path=path,
                role="parameter",
                shape=(2, 2),
                dtype="float32",
                spec=spec,
                device_bytes=16,
            )
            for path, spec in tensors
        ),
        memory=PlannedMemory(arguments=1, gradients=0, activations=0, margin=0, available=9),
        time=PlannedTime(compute=0.5, exposed=0.0, traffic=(), mfu=0.25),
    )


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((), jax.P()),
        (((), ()), jax.P()),
        ((("data",), ()), jax.P("data")),
        (((), ("data",)), jax.P(None, "data")),
    ],
)
def test_spec_of_the_plan_is_that_of_the_array(mesh: Any, spec: Any, expected: jax.P) -> None:
    lowered = Lowered(plan_of(("w", spec)), mesh)
    assert lowered.mesh is mesh
    assert lowered.sharding("w") == jax.NamedSharding(mesh, expected)
    assert lowered.sharding("w").spec == expected
    assert lowered.sharding("missing").spec == jax.P()


@pytest.mark.parametrize("whole", [True, False])
def test_whole_batch_is_replicated(mesh: Any, whole: bool) -> None:
    values = (np.ones((4, 2)), {"y": np.ones(4)})
    batch = Batch(values, 4, whole, everything=lambda: values)
    x, rest = Lowered(plan_of(), mesh).batch(batch)
    assert x.shape == (4, 2)
    spec = jax.P() if whole else jax.P("data")
    assert x.sharding.spec == rest["y"].sharding.spec == spec


def test_step_of_a_plan_without_a_split_is_unchanged(mesh: Any) -> None:
    lowered = Lowered(plan_of(), mesh)
    with lowered.scope():
        step = lowered.over(lambda w, batch: w + batch.sum(), jax.NamedSharding(mesh, jax.P()))
        assert step(1.0, np.ones(3)) == 4.0


@pytest.mark.parametrize(
    ("zero", "model", "has_layout", "by_rows"),
    [(0, 1, False, False), (1, 1, True, False), (3, 1, True, True), (0, 2, True, True)],
)
def test_layout_constrains_only_split_plans(
    mesh: Any, zero: int, model: int, has_layout: bool, by_rows: bool
) -> None:
    layout = mesh_layout_of(plan_of(zero=zero, model=model), mesh, [((),)])
    assert (layout is not None) is has_layout
    assert layout is None or layout.rows is by_rows


def test_replicated_arrays_are_not_sharded(mesh: Any) -> None:
    assert not is_sharded(np.ones(2), mesh)
    assert not is_sharded(jnp.ones(2), mesh)


def test_sharding_is_over_a_mesh_with_its_axes(mesh: Any) -> None:
    other = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    assert is_over(jax.NamedSharding(mesh, jax.P()), mesh)
    assert not is_over(jax.NamedSharding(other, jax.P()), mesh)
    assert not is_over(jax.sharding.SingleDeviceSharding(jax.devices()[0]), mesh)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (jax.P(), ((), ())),
        (jax.P("data"), (("data",), ())),
        (jax.P(None, ("data",)), ((), ("data",))),
    ],
)
def test_spec_has_the_axes_of_each_dimension(mesh: Any, spec: jax.P, expected: Any) -> None:
    array = jax.device_put(np.ones((2, 2)), jax.NamedSharding(mesh, spec))
    assert spec_of(array) == expected
