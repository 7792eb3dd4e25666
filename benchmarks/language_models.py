"""Training steps of decoder-only transformers, written as if for one device.

Layers are stacked and applied in a scan, or applied one by one. Weights are stored in the type of
the products, and Adam's moments in float32. Nothing is recomputed: a plan selects remat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

Attention = Literal["plain", "cudnn", "pallas"]
"""Plain products and softmax, cuDNN's fused attention, or the Pallas kernel of JAX for TPUs."""

_CUDNN = 91000
"""Version that JAX reads when it traces fused attention."""


@dataclass(frozen=True)
class LanguageModel:
    """Sizes of a model.

    Attributes:
        vocabulary: entries of the table.
        width: size of the values between layers.
        length: tokens of a sequence.
        heads: query heads.
        groups: heads of keys and of values.
        head: width of a head.
        wide: inner width of the MLP.
        gated: True for SwiGLU and a separate head, as in Llama; False for GELU and a tied head.
        attention: kind of attention; a kernel of Pallas needs as many groups as heads.
        dtype: type of weights and products.
        is_scanned: True for stacked layers in a scan; False for layers one by one.
    """

    vocabulary: int
    width: int
    layers: int
    length: int
    heads: int
    groups: int
    head: int
    wide: int
    gated: bool = False
    attention: Attention = "plain"
    dtype: str = "bfloat16"
    is_scanned: bool = True


def gpt(
    vocabulary: int, width: int, layers: int, length: int, heads: int, dtype: str = "bfloat16"
) -> LanguageModel:
    """Return a GPT, whose MLP is four times as wide as its layers."""
    return LanguageModel(
        vocabulary, width, layers, length, heads, heads, width // heads, 4 * width, dtype=dtype
    )


def traced_step(model: LanguageModel, rows: int) -> tuple[Any, Any]:
    """Return the traced step for `rows` sequences and its inputs. Creates no arrays."""
    whole = jnp.float32
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, model.dtype), _shapes(model), is_leaf=_is_shape
    )
    moments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, whole), params)
    tokens = jax.ShapeDtypeStruct((rows, model.length + 1), jnp.int32)
    given = {"params": params, "first": moments, "second": moments, "tokens": tokens}
    inputs: Any = [
        (name + jax.tree_util.keystr(path), "batch" if name == "tokens" else "carried")
        for name, tree in given.items()
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    # Tracing needs no cuDNN, and JAX asks for its version.
    with mock.patch.object(fused_attention_stablehlo, "check_cudnn_version", return_value=_CUDNN):
        return jax.jit(partial(_step, model)).trace(*given.values()).jaxpr, inputs


def _shapes(model: LanguageModel) -> dict[str, Any]:
    layers, width, wide = model.layers, model.width, model.wide
    each = model.heads // model.groups  # queries that share a key and a value
    heads = (model.groups, each) if model.attention == "plain" else (model.heads,)
    stacked = {
        "query": (layers, width, *heads, model.head),
        "key": (layers, width, model.groups, model.head),
        "value": (layers, width, model.groups, model.head),
        "out": (layers, *heads, model.head, width),
        "up": (layers, width, wide),
        "down": (layers, wide, width),
        "before": (layers, width),
        "between": (layers, width),
    }
    if model.gated:
        stacked["gate"] = (layers, width, wide)
    one = {name: shape[1:] for name, shape in stacked.items()}
    found = {
        "table": (model.vocabulary, width),
        "last": (width,),
        "layers": stacked if model.is_scanned else [one] * layers,
    }
    return found | ({"head": (width, model.vocabulary)} if model.gated else {})


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


def _norm(x: Any, scale: Any, *, centered: bool) -> Any:
    if centered:
        x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def _layer(model: LanguageModel, x: Any, layer: Any) -> Any:
    y = _norm(x, layer["before"], centered=not model.gated)
    k, v = (jnp.einsum("bsh,hgd->bsgd", y, layer[name]) for name in ("key", "value"))
    x = x + _ATTENTIONS[model.attention](y, k, v, layer)
    y = _norm(x, layer["between"], centered=not model.gated)
    inner = y @ layer["up"]
    inner = jax.nn.silu(y @ layer["gate"]) * inner if model.gated else jax.nn.gelu(inner)
    return x + inner @ layer["down"], None


def _cudnn_attention(y: Any, k: Any, v: Any, layer: Any) -> Any:
    q = jnp.einsum("bsh,hnd->bsnd", y, layer["query"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return jnp.einsum("bsnd,ndh->bsh", mixed, layer["out"])


def _attention(y: Any, k: Any, v: Any, layer: Any) -> Any:
    q = jnp.einsum("bsh,hgpd->bsgpd", y, layer["query"])
    scores = jnp.einsum("bsgpd,btgd->bgpst", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e4))
    return jnp.einsum("bgpst,btgd,gpdh->bsh", weights, v, layer["out"])


def _pallas_attention(y: Any, k: Any, v: Any, layer: Any) -> Any:
    q = jnp.einsum("bsh,hnd->bnsd", y, layer["query"])
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    mixed = flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5)
    return jnp.einsum("bnsd,ndh->bsh", mixed, layer["out"])


_ATTENTIONS = {"plain": _attention, "cudnn": _cudnn_attention, "pallas": _pallas_attention}


def _loss(model: LanguageModel, params: Any, tokens: Any) -> Any:
    x, layers = params["table"][tokens[:, :-1]], params["layers"]
    if model.is_scanned:
        x, _ = jax.lax.scan(partial(_layer, model), x, layers)
    else:
        for layer in layers:
            x, _ = _layer(model, x, layer)
    x = _norm(x, params["last"], centered=not model.gated)
    head = params["head"] if model.gated else params["table"].T
    log = jax.nn.log_softmax((x @ head).astype(jnp.float32))
    return -jnp.take_along_axis(log, tokens[:, 1:, None], -1).mean()


def _step(model: LanguageModel, params: Any, first: Any, second: Any, tokens: Any) -> Any:
    loss, slopes = jax.value_and_grad(partial(_loss, model))(params, tokens)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * jnp.square(g), second, slopes)
    params = jax.tree.map(
        lambda p, m, v: (p - 1e-4 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype), params, first, second
    )
    return loss, params, first, second
