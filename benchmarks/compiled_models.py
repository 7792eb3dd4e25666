"""Three models to plan and compile: a transformer, residual blocks and convolutions.

All use bfloat16 and momentum. They consist of shapes only and take no memory.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.graph.model import Role


def traced(name: str, *, tiny: bool = False) -> tuple[Any, list[tuple[str, Role]]]:
    """Return the step of a model, or of a tiny one with the same operations. See `stepped`."""
    return stepped(*MODELS[name](tiny=tiny))


def stepped(loss: Any, params: Any, *batch: Any) -> tuple[Any, list[tuple[str, Role]]]:
    """Return the jaxpr of a step with momentum, and the names and roles of its inputs."""

    def step(params: Any, moments: Any, *batch: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, *batch)
        moments = jax.tree.map(lambda m, g: (0.9 * m + g).astype(m.dtype), moments, slopes)
        return value, jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    carried = jax.tree_util.tree_leaves_with_path((params, params))
    inputs: list[tuple[str, Role]] = [
        *((jax.tree_util.keystr(path), "carried") for path, _ in carried),
        *((f"batch[{place}]", "batch") for place in range(len(batch))),
    ]
    return jax.jit(step).trace(params, params, *batch).jaxpr, inputs


def _floats(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _labels(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def _cross_entropy(scores: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(scores.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[..., None], -1).mean()


def _transformer(*, tiny: bool = False) -> tuple[Any, ...]:
    """16 layers in a scan, width 2,048, 128 sequences of 1,024, a vocabulary of 32,000."""
    sizes = (2, 256, 2, 128, 1024) if tiny else (16, 2048, 16, 1024, 32_000)
    layers, wide, heads, length, vocabulary = sizes
    each = wide // heads
    params = {
        "embedding": _floats(vocabulary, wide),
        "layers": {
            "first": _floats(layers, wide),
            "second": _floats(layers, wide),
            "qkv": _floats(layers, wide, 3, heads, each),
            "out": _floats(layers, heads, each, wide),
            "up": _floats(layers, wide, 4 * wide),
            "down": _floats(layers, 4 * wide, wide),
        },
        "norm": _floats(wide),
    }

    def normed(x: Any, scale: Any) -> Any:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x.astype(jnp.bfloat16) * scale

    def layer(x: Any, own: Any) -> tuple[Any, None]:
        q, k, v = jnp.einsum("btw,wchd->cbthd", normed(x, own["first"]), own["qkv"])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(each)
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.bfloat16), v)
        x = x + jnp.einsum("bqhd,hdw->bqw", mixed, own["out"])
        return x + jax.nn.gelu(normed(x, own["second"]) @ own["up"]) @ own["down"], None

    def loss(params: Any, tokens: Any, following: Any) -> Any:
        x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
        return _cross_entropy(normed(x, params["norm"]) @ params["embedding"].T, following)

    return loss, params, _labels(128, length), _labels(128, length)


def _blocks(*, tiny: bool = False) -> tuple[Any, ...]:
    """Six residual blocks, width 8,192, 16,384 rows."""
    wide, rows = (256, 1024) if tiny else (8192, 16_384)
    params = [{"up": _floats(wide, 4 * wide), "down": _floats(4 * wide, wide)}] * 6

    def loss(params: Any, x: Any, y: Any) -> Any:
        for own in params:
            x = x + jax.nn.relu(x @ own["up"]) @ own["down"]
        return ((x - y).astype(jnp.float32) ** 2).mean()

    return loss, params, _floats(rows, wide), _floats(rows, wide)


def _convolutions(*, tiny: bool = False) -> tuple[Any, ...]:
    """22 convolutions with ReLUs over 2,048 images of 128 x 128, 64 to 512 channels."""
    images, side = (64, 16) if tiny else (2048, 128)
    channels = [3] + [64] * 6 + [128] * 6 + [256] * 6 + [512] * 4
    strides = [2 if new == 2 * old else 1 for old, new in itertools.pairwise(channels)]
    kernels = [_floats(3, 3, old, new) for old, new in itertools.pairwise(channels)]
    numbers = "NHWC", "HWIO", "NHWC"

    def loss(params: Any, x: Any, y: Any) -> Any:
        for kernel, stride in zip(params, strides, strict=False):
            steps = stride, stride
            x = jax.lax.conv_general_dilated(x, kernel, steps, "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x)
        return _cross_entropy(x.mean((1, 2)) @ params[-1], y)

    return loss, [*kernels, _floats(512, 1000)], _floats(images, side, side, 3), _labels(images)


MODELS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "transformer": _transformer,
    "blocks": _blocks,
    "convolutions": _convolutions,
}
"""Functions that return loss, parameters and batch of each model, by name."""
