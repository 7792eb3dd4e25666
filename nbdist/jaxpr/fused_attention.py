"""cuDNN's fused attention, `jax.nn.dot_product_attention(..., implementation="cudnn")`.

Scores stay on the chip. Each sequence and each head is computed by itself, so both may be sharded.
The kernels skip scores that a causal mask excludes (Dao, arXiv:2307.08691, section 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.jaxpr.model_builder import Builder
    from nbdist.planner.graph.model import Value

PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
"""Products of the size of all scores, by primitive; the backward pass computes scores again."""

_LENGTH_LAST = 1
"""Value of the parameter `layout` for [batch, heads, length, width]."""


def attention_rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie sequences and heads of all inputs and results, and count the products."""
    outs, params = build.outs(eqn), eqn.params
    heads = 1 if params["layout"] == _LENGTH_LAST else 2
    queries, keys = ins[0], ins[1]
    for value in (*ins, *outs):
        if len(value.sizes) == 4 and 0 not in value.sizes:
            build.dims.tie(queries.groups[0], value.groups[0])
            build.dims.tie(queries.groups[heads], value.groups[heads])
            for dim in {1, 2, 3} - {heads}:
                build.dims.block(value.groups[dim], "fused attention needs it whole")
        elif len(value.sizes) == 3:  # logarithms of sums: [batch, heads, length]
            build.dims.tie_all((queries.groups[0], queries.groups[heads]), value.groups[:2])
    length = keys.sizes[3 - heads]
    whole = 2.0 * queries.size * length * PRODUCTS[eqn.primitive.name]
    causal = "CAUSAL" in params["mask_type"].name
    build.emit("attention", ins, outs, flops=whole / 2 if causal else whole)
    return outs
