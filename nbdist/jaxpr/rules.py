"""Rules of JAX's primitives: dimensions that are tied, sums and costs.

A rule creates the values of an equation's results. Dimensions of size 1 are never tied, because
they may stand for any size. Primitives without a rule tie nothing, and their dimensions are not
sharded.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from nbdist.jaxpr.fused_attention import PRODUCTS, attention_rule

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.jaxpr.model_builder import Builder, Rule
    from nbdist.planner.graph.model import Value


def _elementwise(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = build.outs(eqn)
    for out in outs:
        for value in ins:
            if len(value.sizes) == len(out.sizes):
                build.dims.tie_all(value.groups, out.groups)
    build.emit("stream", ins, outs)
    return outs


def _by_position(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = build.outs(eqn)
    for value, out in zip(ins, outs, strict=True):
        build.dims.tie_all(value.groups, out.groups)
    build.emit("stream", ins, outs)
    return outs


def _fresh(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = build.outs(eqn)
    build.emit("stream", ins, outs)
    return outs


def _broadcast(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (out,) = build.outs(eqn)
    for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
        if ins[0].sizes[dim] == out.sizes[place]:
            build.dims.tie(ins[0].groups[dim], out.groups[place])
    build.emit("stream", ins[:1], [out])
    return [out]


def _transpose(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (out,) = build.outs(eqn)
    build.dims.tie_all([ins[0].groups[dim] for dim in eqn.params["permutation"]], out.groups)
    build.emit("stream", ins, [out])
    return [out]


def _reshape(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie the first dimension of each merged or split run; no other dimension can be sharded."""
    (out,) = build.outs(eqn)
    for olds, news in _factors(ins[0].sizes, out.sizes):
        if olds and news:
            build.dims.tie(ins[0].groups[olds[0]], out.groups[news[0]])
            for dim in olds[1:]:
                build.dims.block(ins[0].groups[dim], "it is merged into another dimension")
            for dim in news[1:]:
                build.dims.block(out.groups[dim], "it is a part of another dimension")
    build.emit("stream", ins[:1], [out])
    return [out]


def _factors(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return runs of dimensions, larger than 1, whose products are equal."""
    olds = [d for d, size in enumerate(old) if size != 1]
    news = [d for d, size in enumerate(new) if size != 1]
    runs = []
    while olds or news:
        a, b = [olds.pop(0)] if olds else [], [news.pop(0)] if news else []
        while (x := math.prod(old[d] for d in a)) != (y := math.prod(new[d] for d in b)):
            rest, own = (olds, a) if x < y else (news, b)
            if not rest:
                break
            own.append(rest.pop(0))
        runs.append((a, b))
    return runs


def _reduced(names: str) -> Rule:
    """Make a rule for primitives that remove the dimensions that a parameter names."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        axes = named_dimensions(eqn, names)
        outs = build.outs(eqn)
        for out in outs:
            build.dims.tie_all(_without(ins[0], axes), out.groups)
        build.emit("reduce", ins, outs, [ins[0].groups[axis] for axis in axes])
        return outs

    return rule


def _dot(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = ins
    (out,) = build.outs(eqn)
    for a, b in zip(left_sum, right_sum, strict=True):
        build.dims.tie(left.groups[a], right.groups[b])
    places = iter(out.groups)
    for a, b in zip(left_batch, right_batch, strict=True):
        build.dims.tie(left.groups[a], right.groups[b])
        build.dims.tie(left.groups[a], next(places))
    for value, taken in ((left, {*left_sum, *left_batch}), (right, {*right_sum, *right_batch})):
        for dim, group in enumerate(value.groups):
            if dim not in taken:
                build.dims.tie(group, next(places))
    length = math.prod(left.sizes[dim] for dim in left_sum)
    flops = 2.0 * math.prod(out.sizes) * length
    build.emit("dot", ins, [out], [left.groups[d] for d in left_sum], flops, length)
    return [out]


def _conv(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    params = eqn.params
    numbers = params["dimension_numbers"]
    left, right = ins
    (out,) = build.outs(eqn)
    spec_in, spec_kernel, spec_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    build.dims.tie(left.groups[spec_in[0]], out.groups[spec_out[0]])
    build.dims.tie(right.groups[spec_kernel[0]], out.groups[spec_out[1]])
    summed = []
    if params["feature_group_count"] == params["batch_group_count"] == 1:
        build.dims.tie(left.groups[spec_in[1]], right.groups[spec_kernel[1]])
        summed = [left.groups[spec_in[1]]]
    else:
        for group in (left.groups[spec_in[1]], right.groups[spec_kernel[0]]):
            build.dims.block(group, "it belongs to a convolution with feature groups")
    for value, spec in ((left, spec_in), (right, spec_kernel), (out, spec_out)):
        for dim in spec[2:]:
            build.dims.block(value.groups[dim], "it is a spatial dimension of a convolution")
    if params["batch_group_count"] > 1:
        # If one of two mesh axes shards the batch, XLA also sums over the other one (jaxlib
        # 0.10.2): the gradient is too large by the number of devices of that axis.
        build.part(
            "XLA computes a wrong gradient of convolutions with feature groups in this layout"
        )
    length = math.prod(right.sizes) // right.sizes[spec_kernel[0]]
    flops = 2.0 * math.prod(out.sizes) * length
    build.emit("conv", ins, [out], summed, flops, length)
    return [out]


def _gather(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    table, indices = ins
    (out,) = build.outs(eqn)
    numbers, slices = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    offsets = list(numbers.offset_dims)
    kept = _others(table, {*numbers.collapsed_slice_dims, *batching})
    for dim, place in zip(kept, offsets, strict=True):
        if slices[dim] == table.sizes[dim]:
            build.dims.tie(table.groups[dim], out.groups[place])
        else:
            build.dims.block(table.groups[dim], "a slice of it is taken")
    rows = _others(out, offsets)
    for dim, place in enumerate(rows):
        build.dims.tie(indices.groups[dim], out.groups[place])
    for dim, index_dim in batching.items():
        build.dims.tie(table.groups[dim], indices.groups[index_dim])
    summed = [table.groups[dim] for dim in numbers.collapsed_slice_dims]
    build.emit("lookup", ins, [out], summed)
    return [out]


def _scatter(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    table, indices, updates = ins
    (out,) = build.outs(eqn)
    numbers = eqn.params["dimension_numbers"]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    build.dims.tie_all(table.groups, out.groups)
    windows = list(numbers.update_window_dims)
    kept = _others(table, {*numbers.inserted_window_dims, *batching})
    for dim, place in zip(kept, windows, strict=True):
        if updates.sizes[place] == table.sizes[dim]:
            build.dims.tie(table.groups[dim], updates.groups[place])
        else:
            build.dims.block(table.groups[dim], "a slice of it is replaced")
    rows = _others(updates, windows)
    for dim, place in enumerate(rows):
        build.dims.tie(indices.groups[dim], updates.groups[place])
    for dim, index_dim in batching.items():
        build.dims.tie(table.groups[dim], indices.groups[index_dim])
    summed = [
        updates.groups[place] for dim, place in enumerate(rows) if dim not in batching.values()
    ]
    build.emit("scatter", ins, [out], summed)
    return [out]


def _sized(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie dimensions that keep their size: for slices, pads and concatenations.

    Slices of integers, such as tokens, are cheap to move, so that their results may be sharded.
    """
    outs = build.outs(eqn)
    for out in outs:
        for value in ins:
            if len(value.sizes) != len(out.sizes):
                continue
            for a, b, x, y in zip(value.groups, out.groups, value.sizes, out.sizes, strict=True):
                if x == y:
                    build.dims.tie(a, b)
                else:
                    build.dims.block(a, "a slice of it is taken, or it is a slice")
                    if eqn.primitive.name != "slice" or value.is_inexact:
                        build.dims.block(b, "a slice of it is taken, or it is a slice")
    build.emit("stream", ins, outs)
    return outs


def _along(names: str) -> Rule:
    """Make a rule: element by element, except along the dimensions that a parameter names."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        outs = _elementwise(build, eqn, ins)
        for dim in named_dimensions(eqn, names):
            for value in (*ins, *outs):
                if value.sizes:
                    build.dims.block(value.groups[dim], f"{eqn.primitive.name} goes along it")
        return outs

    return rule


def _top_k(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = build.outs(eqn)
    for out in outs:
        build.dims.tie_all(ins[0].groups[:-1], out.groups[:-1])
        build.dims.block(ins[0].groups[-1], "top_k runs along it")
    build.emit("stream", ins, outs)
    return outs


def _window(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie the dimensions that a pooling window leaves whole."""
    outs = build.outs(eqn)
    for out in outs:
        for value in ins:
            for d, window in enumerate(eqn.params["window_dimensions"] if value.sizes else ()):
                if window == 1 and value.sizes[d] == out.sizes[d]:
                    build.dims.tie(value.groups[d], out.groups[d])
                else:
                    build.dims.block(value.groups[d], "windows slide along it")
                    build.dims.block(out.groups[d], "windows slide along it")
    build.emit("stream", ins, outs)
    return outs


def _dropping(names: str) -> Rule:
    """Make a rule for primitives that add or remove the dimensions that a parameter names."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        outs, gone = build.outs(eqn), named_dimensions(eqn, names)
        for value, out in itertools.product(ins, outs):
            short, long = sorted((value, out), key=lambda side: len(side.sizes))
            build.dims.tie_all(_without(long, gone), short.groups)
        build.emit("stream", ins, outs)
        return outs

    return rule


def _bitcast(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie all dimensions but the last one, if element sizes differ."""
    (out,) = build.outs(eqn)
    longer = max(ins[0].groups, out.groups, key=len)
    for a, b in zip(ins[0].groups, out.groups, strict=False):
        build.dims.tie(a, b)
    for group in longer[min(len(ins[0].groups), len(out.groups)) :]:
        build.dims.block(group, "it holds parts of elements")
    build.emit("stream", ins, [out])
    return [out]


def unknown(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Block all dimensions of an unknown primitive."""
    name = eqn.primitive.name
    outs = build.outs(eqn)
    for value in (*ins, *outs):
        for group in value.groups:
            build.dims.block(group, f"there is no rule for {name}")
    build.note(f"there is no rule for the operation {name}: its dimensions are not sharded")
    build.leave_unpriced(name)
    build.emit("stream", ins, outs)
    return outs


def _others(value: Value, gone: Collection[int]) -> list[int]:
    """Return the other dimensions of a value."""
    return [dim for dim in range(len(value.sizes)) if dim not in gone]


def _without(value: Value, gone: Collection[int]) -> list[int]:
    """Return the groups of the other dimensions of a value."""
    return [value.groups[dim] for dim in _others(value, gone)]


def named_dimensions(eqn: Any, names: str) -> set[int]:
    """Return the dimensions that a parameter of a primitive names: one number, or several."""
    given = eqn.params[names]
    return set(given) if isinstance(given, (tuple, list)) else {given}


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv
erfc exp exp2 expm1 floor ge gt igamma igammac igamma_grad_a imag integer_pow is_finite le le_to
lgamma log log1p log2 logistic lt lt_to max min mul name ne neg nextafter not one_minus_square or
polygamma population_count pow pvary random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
threefry2x32 xor zeta
""".split()  # noqa: SIM905 - three lines a screen, not ninety

PLAIN: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _reduced("axes"),
    ),
    **dict.fromkeys(("argmax", "argmin", "reduce_xor"), _reduced("axes")),
    "reduce": _reduced("dimensions"),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "pad"), _sized),
    **dict.fromkeys(("concatenate", "split", "tile"), _sized),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"),
        _scatter,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _window),
    **dict.fromkeys(
        ("iota", "random_seed", "random_bits", "random_fold_in", "random_split", "random_wrap"),
        _fresh,
    ),
    **dict.fromkeys(("random_unwrap", "random_clone", "random_gamma", "rng_uniform"), _fresh),
    "empty2": _fresh,  # of the derivative of `lax.cond`
    **dict.fromkeys(PRODUCTS, attention_rule),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "expand_dims": _dropping("dimensions"),
    "gather": _gather,
    "optimization_barrier": _by_position,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "squeeze": _dropping("dimensions"),
    "stack": _dropping("axis"),
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _dropping("axis"),
}
"""Rules of primitives without inner programs, by name; others are in `planner_model.py`."""
