"""Planner models of steps, traced in this process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from nbdist.jaxpr.planner_model import model_of
from nbdist.planner.cost.time import Target
from nbdist.planner.hardware.efficiency import calibration_of
from nbdist.planner.hardware.topology import parse
from nbdist.planner.hardware.topology_live import live
from nbdist.records import LocalDevices
from tests.plan_programs import BATCH, PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Model, Role, Tensor


def traced(step: Callable[..., Any], carried: Any = (), read: Any = (), batch: Any = ()) -> Model:
    """Return the model of a step that takes three pytrees of arrays or of shapes."""
    closed = jax.jit(step).trace(carried, read, batch).jaxpr
    roles: list[tuple[Role, Any]] = [("carried", carried), ("read", read), ("batch", batch)]
    inputs = [
        (jax.tree_util.keystr(path), role)
        for role, tree in roles
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return model_of(closed, inputs)


@cache
def model_of_program(name: str) -> Model:
    """Return the model of one of the `PROGRAMS`, traced like its step cell."""
    program = PROGRAMS[name]
    space: dict[str, Any] = {}
    exec(program.setup, space)
    code = compile(program.step, name, "exec")
    names = program.given.split(", ")
    graph, state = nnx.split(tuple(space[name] for name in names), graph=True)
    leaves, structure = jax.tree.flatten(state)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def step(arrays: dict[str, Any], _: Any, batch: Any) -> Any:
        every = list(leaves)
        for place, array in zip(places, arrays.values(), strict=True):
            every[place] = array
        values = nnx.merge(graph, jax.tree.unflatten(structure, every))
        own = space | dict(zip(names, values, strict=True), batch=batch)
        exec(code, own)
        left = nnx.state(tuple(own[name] for name in names), graph=True)
        after = jax.tree.leaves(left)
        return own["loss"], [jnp.asarray(after[place]) for place in places]

    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    carried = {paths[place]: leaves[place] for place in places}
    batch = jax.tree.map(lambda array: array[:BATCH], space["train"])
    return traced(step, carried, (), batch)


def tensor(model: Model, path: str) -> Tensor:
    """Return the tensor whose path ends with `path`."""
    (found,) = [t for t in model.tensors if t.path.endswith(path)]
    return found


def hardware(text: str) -> Target:
    topology = parse(text)
    return Target(topology, calibration_of(topology.chip))


def engines(processes: int, devices: int) -> Target:
    """Return workers with virtual devices on one machine."""
    own = LocalDevices(host="here", platform="cpu", kind="cpu", devices=devices, memory_bytes=2**30)
    topology = live([own] * processes)
    return Target(topology, calibration_of(topology.chip), cautious=True)


def transformer(
    width: int, layers: int, rows: int, length: int = 2048, vocabulary: int = 32768, heads: int = 32
) -> Model:
    """Return a step of a bfloat16 transformer with separate layers, from shapes only."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def normed(x: Any, scale: Any) -> Any:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def block(x: Any, p: Any) -> Any:
        y = normed(x, p["norm1"])
        q, k, v = (
            (y @ p[name]).reshape(rows, length, heads, width // heads) for name in ("q", "k", "v")
        )
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ p["o"]
        return x + jax.nn.gelu(normed(x, p["norm2"]) @ p["up"]) @ p["down"]

    def step(params: Any, _: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            x = params["embedding"][batch[0]]
            for own in params["layers"]:
                x = jax.checkpoint(block)(x, own)
            logits = jax.nn.log_softmax(normed(x, params["norm"]) @ params["head"])
            return -jnp.take_along_axis(logits, batch[1][..., None], axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    square = {name: shape(width, width) for name in ("q", "k", "v", "o")}
    layer = square | {
        "norm1": shape(width),
        "norm2": shape(width),
        "up": shape(width, 4 * width),
        "down": shape(4 * width, width),
    }
    params = {
        "embedding": shape(vocabulary, width),
        "layers": [layer] * layers,
        "norm": shape(width),
        "head": shape(width, vocabulary),
    }
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return traced(step, params, (), (tokens, tokens))


def frozen_table(rows: int) -> Model:
    """Return a step that looks up rows of a frozen table and trains weights for them."""

    def step(weights: Any, table: Any, batch: Any) -> Any:
        error = jax.value_and_grad(lambda weights: jnp.mean((table[batch] @ weights) ** 2))
        loss, grads = error(weights)
        return loss, weights - 0.1 * grads

    shapes = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in ((16, 16), (rows, 16))]
    return traced(step, shapes[0], shapes[1], jax.ShapeDtypeStruct((4096,), jnp.int32))


def regression(rows: int) -> Model:
    """Return a step with little computation for each of its rows of 1,024 columns."""

    def step(weights: Any, _: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return loss, weights - 0.1 * grads

    shape = jax.ShapeDtypeStruct((1024, 1), jnp.float32)
    return traced(step, shape, (), jax.ShapeDtypeStruct((rows, 1024), jnp.float32))


def table(rows: int) -> Model:
    """Return a step of a table with `rows` rows and 16 columns, from shapes only."""

    def step(table: Any, _: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda table: jnp.mean(table[batch] ** 2))(table)
        return loss, table - 0.1 * grads

    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    return traced(step, shape, (), jax.ShapeDtypeStruct((4096,), jnp.int32))
