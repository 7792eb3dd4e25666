"""Plans of small traced steps, and plans made by hand."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.time import Target
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.search.search import plan
from nbdist.records import Plan, PlannedMemory, PlannedTensor, PlannedTime, Planning

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model
    from nbdist.records import Schedule, Spec

LAYERS, WIDE, ROWS = 6, 256, 64
TWO_HOSTS = "2 hosts x 4 A100"
HOSTILE = "['<script>alert(1)</script>']"
ASKED: dict[str, tuple[str, dict[str, int]]] = {
    "one": ("1xH100", {}),
    "gpus": ("8xH100", {}),
    "sharded": ("8xH100", {"data": 8, "zero": 3}),
    "both": ("8xCPU", {"data": 4, "model": 2, "zero": 1}),
    "hosts": ("4 hosts x 4 V100, 25 Gbps", {"data": 4, "model": 4, "zero": 3}),
}


def loss(params: Any, x: Any, y: Any) -> Any:
    for layer in params["layers"]:
        x = x + jax.nn.relu(x @ layer["up"] + layer["b"]) @ layer["down"]
    return ((x @ params["<script>alert(1)</script>"] - y) ** 2).mean()


def step(params: Any, moments: Any, x: Any, y: Any) -> Any:
    value, slopes = jax.value_and_grad(loss)(params, x, y)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, slopes)
    return value, jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@functools.cache
def made(name: str) -> Plan:
    """Return a real plan of a step with a list of layers and a hostile name."""
    on, fixed = ASKED[name]
    layer = {"up": shape(WIDE, 4 * WIDE), "down": shape(4 * WIDE, WIDE), "b": shape(4 * WIDE)}
    params = {"layers": [layer] * LAYERS, "<script>alert(1)</script>": shape(WIDE, 8)}
    given = {"params": params, "moments": params, "x": shape(ROWS, WIDE), "y": shape(ROWS, 8)}
    roles = {"x": "batch", "y": "batch"}
    inputs: Any = [
        (key + jax.tree_util.keystr(path), roles.get(key, "carried"))
        for key, tree in given.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    model = model_of(jax.make_jaxpr(step)(*given.values()), inputs)
    topology = parse(on)
    return plan(model, Target(topology, calibration_of(topology.chip)), Planning(fixed=fixed))


def stacked_loss(params: Any, x: Any, y: Any) -> Any:
    def layer(x: Any, own: Any) -> tuple[Any, None]:
        return x + jax.nn.relu(x @ own["up"] + own["b"]) @ own["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return ((x @ params["head"] - y) ** 2).mean()


def stacked_step(params: Any, moments: Any, x: Any, y: Any) -> Any:
    value, slopes = jax.value_and_grad(stacked_loss)(params, x, y)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, slopes)
    return value, jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def stacked_traced(layers: int = 8, wide: int = WIDE, rows: int = ROWS) -> tuple[Any, Any]:
    """Return the jaxpr of a step that scans over its layers, and the roles of its inputs."""
    params = {
        "layers": {
            "up": shape(layers, wide, 4 * wide),
            "down": shape(layers, 4 * wide, wide),
            "b": shape(layers, 4 * wide),
        },
        "head": shape(wide, 8),
    }
    given = {"params": params, "moments": params, "x": shape(rows, wide), "y": shape(rows, 8)}
    inputs: Any = [
        (key + jax.tree_util.keystr(path), "batch" if key in "xy" else "carried")
        for key, tree in given.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return jax.make_jaxpr(stacked_step)(*given.values()), inputs


@functools.cache
def stacked(layers: int = 8, wide: int = WIDE, rows: int = ROWS) -> Model:
    """Return the model of such a step."""
    return model_of(*stacked_traced(layers, wide, rows))


@functools.cache
def piped(schedule: Schedule = "gpipe", **fixed: int) -> Plan:
    """Return a real plan of such a step, with stages."""
    topology = parse("2 hosts x 4 A100")
    target = Target(topology, calibration_of(topology.chip))
    return plan(stacked(), target, Planning(fixed=fixed, schedule=schedule))


def by_hand(*tensors: PlannedTensor, data: int = 2, model: int = 2, over: int = 0) -> Plan:
    given = sum(tensor.device_bytes for tensor in tensors)
    return Plan(
        axes={"data": data, "model": model},
        zero=0,
        rows=8,
        on="4 x CPU, 4 GiB each: 1 host of 4",
        tensors=tensors,
        memory=PlannedMemory(
            arguments=given,
            gradients=10,
            activations=20,
            margin=30,
            available=max(1, given + 60 - over if over else 2 * given + 100),
        ),
        time=PlannedTime(compute=0.5, exposed=0.0, traffic=(), mfu=0.25),
    )


def tensor(path: str, *sizes: int, role: str = "parameter", first: str = "") -> PlannedTensor:
    spec = tuple((first,) if first and not dim else () for dim in range(len(sizes)))
    nbytes = 4 * math.prod(sizes) // (2 if first else 1)
    return PlannedTensor(path, role, sizes, "float32", spec, nbytes)


def spec(found: Plan, path: str) -> Spec:
    """Return the spec of the tensor at a path."""
    (own,) = [t for t in found.tensors if t.path == path]
    return own.spec


def fixed(**sizes: int) -> Planning:
    return Planning(fixed=sizes)
