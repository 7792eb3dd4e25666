"""A step with attention in a Pallas kernel, which runs on CPUs too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from nbdist.jaxpr.planner_model import model_of

ROWS, LENGTH, HEADS, WIDTH = 8, 16, 4, 8


def _attended(q: Any, k: Any, v: Any) -> Any:
    """Return the attention of one row and head."""
    return jax.nn.softmax(q @ k.T * WIDTH**-0.5) @ v


def kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any) -> None:
    o_ref[...] = _attended(q_ref[...], k_ref[...], v_ref[...])


def backward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, slope_ref: Any, *out_refs: Any) -> None:
    _, backward = jax.vjp(_attended, q_ref[...], k_ref[...], v_ref[...])
    for out_ref, slope in zip(out_refs, backward(slope_ref[...]), strict=True):
        out_ref[...] = slope


def _call(kernel: Any, outs: int, *arrays: Any) -> Any:
    rows, length, heads, width = arrays[0].shape
    spec = pl.BlockSpec((None, length, None, width), lambda row, head: (row, 0, head, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows, heads),
        in_specs=[spec] * len(arrays),
        out_specs=[spec] * outs,
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * outs,
        interpret=True,
    )(*arrays)


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    """Return the attention of [rows, length, heads, width] arrays."""
    return _call(kernel, 1, q, k, v)[0]


def _forward(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v), (q, k, v)


def _backward(kept: Any, slope: Any) -> Any:
    return tuple(_call(backward_kernel, 3, *kept, slope))


attention.defvjp(_forward, _backward)


def attended(params: dict[str, Any], x: Any) -> Any:
    """Return the results of an attention layer."""
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, params[name]) for name in "qkv")
    return jnp.einsum("bshd,hdf->bsf", attention(q, k, v), params["out"])


def step(params: dict[str, Any], x: Any) -> Any:
    """Train one step on [rows, length, features]."""

    def loss(params: dict[str, Any]) -> Any:
        return ((attended(params, x) - x) ** 2).mean()

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)


def shapes() -> tuple[dict[str, Any], Any]:
    """Return the shapes of the parameters and the batch."""
    features = HEADS * WIDTH
    into, out = (features, HEADS, WIDTH), (HEADS, WIDTH, features)
    sizes = {"k": into, "out": out, "q": into, "v": into}
    given = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return given, jax.ShapeDtypeStruct((ROWS, LENGTH, features), jnp.float32)


def inputs() -> Any:
    """Return path and role of each input."""
    return [*((name, "carried") for name in ("k", "out", "q", "v")), ("x", "batch")]


def model() -> Any:
    """Return the planner's model of the step."""
    return model_of(jax.make_jaxpr(step)(*shapes()), inputs())
