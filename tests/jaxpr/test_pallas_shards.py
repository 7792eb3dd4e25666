"""Pallas kernels that are split: the numbers of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from nbdist.errors import PlanError
from nbdist.jaxpr.pallas_shards import with_sharded_kernels
from nbdist.jaxpr.sharding_constraints import MeshLayout
from nbdist.records import batch_axes
from nbdist.worker.planning.rewrite import rewriting, rewritten
from tests import pallas_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Spec

_INTO: Spec = ((), ("model",), ())
HEADS_SHARDED: list[Spec] = [_INTO, (("model",), (), ()), _INTO, _INTO]
"""Specs of the parameters `k`, `out`, `q` and `v` with tensor parallelism."""


def layered(params: dict[str, Any], x: Any) -> Any:
    """Train a step whose kernels are in a scan over two layers."""

    def loss(params: dict[str, Any]) -> Any:
        def layer(x: Any, _: None) -> tuple[Any, None]:
            return pallas_steps.attended(params, x), None

        x_after, _ = jax.lax.scan(layer, x, length=2)
        return ((x_after - x) ** 2).mean()

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)


def of_each_row(params: dict[str, Any], x: Any) -> Any:
    """Train a step whose kernels `jax.vmap` applies to each row."""

    def loss(params: dict[str, Any]) -> Any:
        after = jax.vmap(lambda row: pallas_steps.attended(params, row[None])[0])(x)
        return ((after - x) ** 2).mean()

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)


def given() -> tuple[dict[str, Any], Any]:
    key = jax.random.key(0)
    shapes, rows = pallas_steps.shapes()
    params = {name: jax.random.normal(key, s.shape) / 8 for name, s in shapes.items()}
    return params, jax.random.normal(key, rows.shape)


def mesh_of(*sizes: int) -> Any:
    names = [("data",), ("data", "model"), ("replicate", "data", "model")][len(sizes) - 1]
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def run(
    sizes: tuple[int, ...],
    micro: int = 1,
    remat: Any = "",
    step: Callable[..., Any] = pallas_steps.step,
) -> tuple[Any, str]:
    """Return the results of a step on a mesh, and its program."""
    mesh = mesh_of(*sizes)
    specs = HEADS_SHARDED if len(sizes) > 1 else [((), (), ())] * 4
    layout = MeshLayout(mesh, specs, products=len(sizes) > 1, kernels=True)
    params, rows = given()
    at = {
        name: jax.NamedSharding(mesh, jax.P(*(axes[0] if axes else None for axes in spec)))
        for name, spec in zip(sorted(params), specs, strict=True)
    }
    with jax.set_mesh(mesh):
        by_rows = jax.NamedSharding(mesh, jax.P(batch_axes(mesh.shape)))
        placed = jax.device_put(params, at), jax.device_put(rows, by_rows)
        own = jax.jit(rewriting(step, remat, micro, layout=layout), out_shardings=(None, at))
        compiled = own.lower(*placed).compile()
        return jax.device_get(compiled(*placed)), compiled.as_text()


def assert_same(made: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("sizes", "micro", "remat"),
    [
        ((2,), 1, ""),
        ((4,), 1, ""),
        ((8,), 1, ""),
        ((2, 2), 1, ""),
        ((2, 4), 1, ""),
        ((1, 4), 1, ""),
        ((2, 2, 2), 1, ""),
        ((2,), 2, ""),
        ((2, 2), 4, "full"),
    ],
)
def test_a_split_step_has_the_numbers_of_one_device(
    sizes: tuple[int, ...], micro: int, remat: Any
) -> None:
    made, _ = run(sizes, micro, remat)
    assert_same(made, jax.jit(pallas_steps.step)(*given()))


@pytest.mark.parametrize(
    ("sizes", "micro", "remat"), [((4,), 1, ""), ((2, 2), 2, ""), ((2,), 2, "full")]
)
def test_kernels_in_a_scan_over_layers_are_split(
    sizes: tuple[int, ...], micro: int, remat: Any
) -> None:
    made, _ = run(sizes, micro, remat, layered)
    assert_same(made, jax.jit(layered)(*given()))


def test_kernels_of_each_row_are_split_along_the_axis_of_vmap() -> None:
    assert [grid[0] for grid in grids((4,), of_each_row)] == [pallas_steps.ROWS // 4] * 2
    for micro in (1, 2):
        made, _ = run((4,), micro, step=of_each_row)
        assert_same(made, jax.jit(of_each_row)(*given()))


@pytest.mark.parametrize("micro", [2, 4, 8])
def test_microbatches_on_one_device_have_its_numbers(micro: int) -> None:
    made = jax.jit(rewriting(pallas_steps.step, "", micro))(*given())
    assert_same(made, jax.jit(pallas_steps.step)(*given()))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 2, 2)])
def test_rows_and_heads_are_not_gathered_for_a_kernel(sizes: tuple[int, ...]) -> None:
    _, text = run(sizes)
    assert "all-gather" not in text
    assert "all-to-all" not in text


def grids(sizes: tuple[int, ...], step: Callable[..., Any] = pallas_steps.step) -> list[Any]:
    """Return the grids of the kernels of a step on a mesh."""
    closed = jax.make_jaxpr(step)(*pallas_steps.shapes())
    mesh = mesh_of(*sizes)
    specs = HEADS_SHARDED if len(sizes) > 1 else []
    program = with_sharded_kernels(closed, pallas_steps.inputs(), mesh, specs).jaxpr
    inner = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map"]
    calls = [eqn for each in (program, *inner) for eqn in each.eqns]
    return [eqn.params["grid_mapping"].grid for eqn in calls if eqn.primitive.name == "pallas_call"]


def test_each_device_runs_its_part_of_the_grid() -> None:
    rows, heads = pallas_steps.ROWS, pallas_steps.HEADS
    assert grids((1,)) == [(rows, heads)] * 2
    assert grids((4,)) == [(rows // 4, heads)] * 2
    assert grids((2, 4)) == [(rows // 2, heads // 4)] * 2


def test_a_kernel_whose_grid_does_not_divide_is_whole() -> None:
    assert grids((3,)) == [(pallas_steps.ROWS, pallas_steps.HEADS)] * 2


def scaled(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * (pl.program_id(0) + 1)


def numbered_rows(params: dict[str, Any], x: Any) -> Any:
    """Train a step whose kernel needs the number of each row."""
    spec = pl.BlockSpec((1, *x.shape[1:]), lambda row: (row, 0, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    made = pl.pallas_call(
        scaled, grid=x.shape[:1], in_specs=[spec], out_specs=spec, out_shape=shape, interpret=True
    )(x)
    return pallas_steps.step(params, made)


def test_a_kernel_that_reads_its_row_number_stays_whole() -> None:
    assert grids((4,), numbered_rows)[0] == (pallas_steps.ROWS,)
    made, _ = run((4,), step=numbered_rows)
    assert_same(made, jax.jit(numbered_rows)(*given()))


def test_stages_are_refused() -> None:
    closed = jax.make_jaxpr(layered)(*pallas_steps.shapes())
    with pytest.raises(PlanError, match="Pallas kernel"):
        rewritten(closed, pallas_steps.inputs(), "", 2, stages=2)


def test_microbatches_of_such_a_kernel_are_refused_with_the_reason() -> None:
    def step(params: dict[str, Any], x: Any) -> Any:
        return numbered_rows(params, jnp.tanh(x * params["q"][0, 0, 0]))

    closed = jax.make_jaxpr(step)(*pallas_steps.shapes())
    with pytest.raises(PlanError, match="the kernel reads its program_id"):
        rewritten(closed, pallas_steps.inputs(), "", 2)
