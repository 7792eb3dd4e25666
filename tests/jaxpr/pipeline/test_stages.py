"""Layers in stages on a mesh of eight devices: transfers, compute and memory of each device."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests import eight_devices
from tests.jaxpr.test_remat import ROWS, WIDTH

pytestmark = pytest.mark.processes

MESH_PROGRAM = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from nbdist.records import Staging
from nbdist.worker.planning.rewrite import rewriting
from tests.jaxpr.test_remat import block

P = jax.P
LAYERS, WIDTH, ROWS, MICRO = 8, 32, 64, 4
rng = np.random.default_rng(0)
def normal(*shape):
    return np.float32(rng.normal(size=shape) / shape[-2] ** 0.5)
params = dict(up=normal(LAYERS, WIDTH, 4 * WIDTH), down=normal(LAYERS, 4 * WIDTH, WIDTH))
batch = tuple(normal(2, ROWS, WIDTH))

SCHEDULE, ROUNDS, LOSS_STAGES = "gpipe", 1, "all"
OUTPUT = None  # sharding of a layer's output

def layer(x, p):
    made = block(x, p)
    return made if OUTPUT is None else jax.lax.with_sharding_constraint(made, OUTPUT), None

def step(params, batch):
    def loss_of(params):
        out, _ = jax.lax.scan(layer, batch[0], params)
        return jnp.mean((out - batch[1]) ** 2)
    loss, grads = jax.value_and_grad(loss_of)(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

auto = (jax.sharding.AxisType.Auto,) * 3
devices = np.array(jax.devices())
wanted = jax.jit(step)(params, batch)

def on(axes, remat=""):
    mesh = jax.sharding.Mesh(devices.reshape(axes), ("stage", "data", "model"), axis_types=auto)
    with jax.set_mesh(mesh):
        laid = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), SPECS)
        rows = jax.NamedSharding(mesh, P("data"))
        given = jax.device_put(params, laid), jax.device_put(batch, rows)
        stages = axes[0]
        staging = Staging(SCHEDULE, ROUNDS, LOSS_STAGES)
        run = rewriting(step, remat, MICRO, stages, staging=staging) if stages > 1 else step
        compiled = jax.jit(run, out_shardings=(None, laid)).lower(*given).compile()
        made = compiled(*given)
        for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return compiled

SPECS = dict(up=P("stage", None, "model"), down=P("stage", "model"))
"""


def run_on_eight_devices(code: str) -> Any:
    return eight_devices.printed_by(MESH_PROGRAM + textwrap.dedent(code))


def test_only_neighbours_send_and_no_parameter_moves() -> None:
    found = run_on_eight_devices(
        """
        pattern = r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)\\(.*op_name=(.*)"
        def collectives(remat):
            for shapes, kind, name in re.findall(pattern, on((2, 2, 2), remat).as_text()):
                for shape in re.findall(r"f32(\\[[\\d,]*\\])", shapes):
                    yield kind, json.loads(shape), "/while/" in name
        print(json.dumps([list(collectives(remat)) for remat in ("", "full")]))
        """
    )
    part = [1, 1, ROWS // 4 // 2, WIDTH]  # rows of a microbatch on one device of a stage
    for collectives in found:
        in_ticks = [(kind, shape) for kind, shape, is_within in collectives if is_within]
        assert {kind for kind, _ in in_ticks} == {"all-reduce", "collective-permute"}
        # Only activations: gradients are summed over data once, after all ticks.
        assert all(shape == part for _, shape in in_ticks)
        after = [(kind, shape) for kind, shape, is_within in collectives if not is_within]
        assert {kind for kind, _ in after} == {"all-reduce", "all-gather"}
        # The first stage gathers the rows of all microbatches at once.
        assert [shape for kind, shape in after if kind == "all-gather"] == [[4, *part[1:]]]
        assert ("all-reduce", [1, 4, WIDTH, 2 * WIDTH]) in after


@pytest.mark.full  # test_one_f_one_b.py has a head
def test_head_is_computed_once() -> None:
    """Each stage computes the head for its own rows."""
    shapes = run_on_eight_devices(
        """
        params["head"], SPECS["head"] = normal(WIDTH, 512), P()
        def step(params, batch):
            def loss_of(params):
                layers = {name: params[name] for name in ("up", "down")}
                out, _ = jax.lax.scan(layer, batch[0], layers)
                return jnp.mean((out @ params["head"]) ** 2)
            loss, grads = jax.value_and_grad(loss_of)(params)
            return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        wanted = jax.jit(step)(params, batch)
        text = on((4, 2, 1)).as_text()
        found = re.findall(r"= f32(\\[\\d+,512\\])\\S* dot\\(", text)
        print(json.dumps([json.loads(shape) for shape in found]))
        """
    )
    assert shapes == [[ROWS // 8, 512]]


@pytest.mark.full  # test_build.py tests the shapes
def test_device_keeps_only_results_of_its_layers() -> None:
    one, four = run_on_eight_devices(
        """
        def temporaries(axes):
            return on(axes).memory_analysis().temp_size_in_bytes
        SPECS = dict(up=P("stage"), down=P("stage"))
        print(json.dumps([temporaries((1, 2, 4)), temporaries((4, 2, 1))]))
        """
    )
    # A quarter of the layers, for (4 + 3) / 4 of the rows, and the other values of a step.
    assert four < 0.7 * one


def test_constrained_layers_and_rows_not_divisible_by_devices_are_correct() -> None:
    run_on_eight_devices(
        """
        OUTPUT = P("data", "model")
        on((2, 2, 2))
        OUTPUT = None
        batch = tuple(rows[:12] for rows in batch)
        wanted = jax.jit(step)(params, batch)
        on((2, 2, 2))
        print(0)
        """
    )
