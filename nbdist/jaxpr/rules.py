"""What each of JAX's primitives ties together, sums over and costs.

A rule makes the values that an equation leaves. Dimensions of the size 1 are never tied: they may
stand for any size. What no rule knows ties nothing, and what it touches stays whole.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from nbdist.planner.graph.dims import Dims
    from nbdist.planner.graph.model import Kind, Value

    Rule = Callable[["Builder", Any, list[Value]], list[Value]]


class Builder(Protocol):
    """Interface of the graph under construction, for rules."""

    dims: Dims

    def new(self, aval: Any) -> Value:
        """Return a value of that type, with dimensions that nothing ties."""
        ...

    def emit(
        self,
        kind: Kind,
        ins: Sequence[Value],
        outs: Sequence[Value],
        summed: Sequence[int] = (),
        flops: float = 0.0,
        contract: int = 1,
    ) -> None:
        """Note an operation."""
        ...

    def inline(self, jaxpr: Any, args: list[Value]) -> list[Value]:
        """What a nested program leaves."""
        ...

    def note(self, text: str) -> None:
        """Note what could not be looked into."""
        ...

    def part(self, why: str) -> None:
        """Note why the batch and the model cannot both be cut."""
        ...


def _outs_of(build: Builder, eqn: Any) -> list[Value]:
    """Return values of the types that an equation leaves."""
    return [build.new(var.aval) for var in eqn.outvars]


def _elementwise(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = _outs_of(build, eqn)
    for out in outs:
        for value in ins:
            if len(value.sizes) == len(out.sizes):
                _tie_all(build, value.groups, out.groups)
    build.emit("stream", ins, outs)
    return outs


def _by_position(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = _outs_of(build, eqn)
    for value, out in zip(ins, outs, strict=True):
        _tie_all(build, value.groups, out.groups)
    build.emit("stream", ins, outs)
    return outs


def _fresh(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = _outs_of(build, eqn)
    build.emit("stream", ins, outs)
    return outs


def _broadcast(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (out,) = _outs_of(build, eqn)
    for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
        if ins[0].sizes[dim] == out.sizes[place]:
            build.dims.tie(ins[0].groups[dim], out.groups[place])
    build.emit("stream", ins[:1], [out])
    return [out]


def _transpose(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (out,) = _outs_of(build, eqn)
    _tie_all(build, [ins[0].groups[dim] for dim in eqn.params["permutation"]], out.groups)
    build.emit("stream", ins, [out])
    return [out]


def _reshape(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Of dimensions that are merged or split, the first one carries the cut of the whole."""
    (out,) = _outs_of(build, eqn)
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
    """Runs of dimensions, larger than 1, whose products are the same."""
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
    """The dimensions that a parameter names go, in all operands alike; the others stay in order."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        axes = _named(eqn, names)
        outs = _outs_of(build, eqn)
        for out in outs:
            _tie_all(build, _without(ins[0], axes), out.groups)
        build.emit("reduce", ins, outs, [ins[0].groups[axis] for axis in axes])
        return outs

    return rule


def _dot(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = ins
    (out,) = _outs_of(build, eqn)
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
    (out,) = _outs_of(build, eqn)
    spec_in, spec_kernel, spec_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    build.dims.tie(left.groups[spec_in[0]], out.groups[spec_out[0]])
    build.dims.tie(right.groups[spec_kernel[0]], out.groups[spec_out[1]])
    summed = []
    if params["feature_group_count"] == params["batch_group_count"] == 1:
        build.dims.tie(left.groups[spec_in[1]], right.groups[spec_kernel[1]])
        summed = [left.groups[spec_in[1]]]
    else:
        for group in (left.groups[spec_in[1]], right.groups[spec_kernel[0]]):
            build.dims.block(group, "its convolution goes by groups of features")
    for value, spec in ((left, spec_in), (right, spec_kernel), (out, spec_out)):
        for dim in spec[2:]:
            build.dims.block(value.groups[dim], "it is a spatial dimension of a convolution")
    if params["batch_group_count"] > 1:
        # On a mesh of two axes of which one cuts the batch, XLA sums over the other as well (jaxlib
        # 0.10.2): the gradient comes out as many times too large as that axis has devices.
        build.part("XLA gets the gradient of a convolution by groups of features wrong then")
    length = math.prod(right.sizes) // right.sizes[spec_kernel[0]]
    flops = 2.0 * math.prod(out.sizes) * length
    build.emit("conv", ins, [out], summed, flops, length)
    return [out]


def _gather(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    table, indices = ins
    (out,) = _outs_of(build, eqn)
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
            build.dims.block(table.groups[dim], "a part of it is taken")
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
    (out,) = _outs_of(build, eqn)
    numbers = eqn.params["dimension_numbers"]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    _tie_all(build, table.groups, out.groups)
    windows = list(numbers.update_window_dims)
    kept = _others(table, {*numbers.inserted_window_dims, *batching})
    for dim, place in zip(kept, windows, strict=True):
        if updates.sizes[place] == table.sizes[dim]:
            build.dims.tie(table.groups[dim], updates.groups[place])
        else:
            build.dims.block(table.groups[dim], "a part of it is replaced")
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
    """Slices, pads, concatenations: a dimension whose size stays as it is stays as it is.

    A part of tokens is cheap to lay out anew: what is made of it may be cut.
    """
    outs = _outs_of(build, eqn)
    for out in outs:
        for value in ins:
            if len(value.sizes) != len(out.sizes):
                continue
            for a, b, x, y in zip(value.groups, out.groups, value.sizes, out.sizes, strict=True):
                if x == y:
                    build.dims.tie(a, b)
                else:
                    build.dims.block(a, "a part of it is taken, or it is a part")
                    if eqn.primitive.name != "slice" or value.is_inexact:
                        build.dims.block(b, "a part of it is taken, or it is a part")
    build.emit("stream", ins, outs)
    return outs


def _along(names: str) -> Rule:
    """Like element by element, but for the dimension that a parameter names."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        outs = _elementwise(build, eqn, ins)
        for dim in _named(eqn, names):
            for value in (*ins, *outs):
                if value.sizes:
                    build.dims.block(value.groups[dim], f"{eqn.primitive.name} goes along it")
        return outs

    return rule


def _top_k(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    outs = _outs_of(build, eqn)
    for out in outs:
        _tie_all(build, ins[0].groups[:-1], out.groups[:-1])
        build.dims.block(ins[0].groups[-1], "top_k goes along it")
    build.emit("stream", ins, outs)
    return outs


def _window(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Pooling: dimensions with a window of 1 stay as they are."""
    outs = _outs_of(build, eqn)
    for out in outs:
        for value in ins:
            for d, window in enumerate(eqn.params["window_dimensions"] if value.sizes else ()):
                if window == 1 and value.sizes[d] == out.sizes[d]:
                    build.dims.tie(value.groups[d], out.groups[d])
                else:
                    build.dims.block(value.groups[d], "windows go over it")
                    build.dims.block(out.groups[d], "windows go over it")
    build.emit("stream", ins, outs)
    return outs


def _dropping(names: str) -> Rule:
    """Either side has dimensions, named by a parameter, that the other lacks."""

    def rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
        outs, gone = _outs_of(build, eqn), _named(eqn, names)
        for value, out in itertools.product(ins, outs):
            short, long = sorted((value, out), key=lambda side: len(side.sizes))
            _tie_all(build, _without(long, gone), short.groups)
        build.emit("stream", ins, outs)
        return outs

    return rule


def _bitcast(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Between types of different sizes the last dimension counts the parts of an element."""
    (out,) = _outs_of(build, eqn)
    longer = max(ins[0].groups, out.groups, key=len)
    for a, b in zip(ins[0].groups, out.groups, strict=False):
        build.dims.tie(a, b)
    for group in longer[min(len(ins[0].groups), len(out.groups)) :]:
        build.dims.block(group, "it holds parts of elements")
    build.emit("stream", ins, [out])
    return [out]


def unknown(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Nothing is known of it: what it touches stays whole."""
    name = eqn.primitive.name
    outs = _outs_of(build, eqn)
    for value in (*ins, *outs):
        for group in value.groups:
            build.dims.block(group, f"nothing is known of {name}")
    build.note(f"nothing is known of the operation {name}: what it touches is not split")
    build.emit("stream", ins, outs)
    return outs


def _others(value: Value, gone: Collection[int]) -> list[int]:
    """Its other dimensions."""
    return [dim for dim in range(len(value.sizes)) if dim not in gone]


def _without(value: Value, gone: Collection[int]) -> list[int]:
    """The groups of its other dimensions."""
    return [value.groups[dim] for dim in _others(value, gone)]


def _named(eqn: Any, names: str) -> set[int]:
    """The dimension, or the dimensions, that a parameter names."""
    given = eqn.params[names]
    return set(given) if isinstance(given, (tuple, list)) else {given}


def _tie_all(build: Builder, a: Sequence[int], b: Sequence[int]) -> None:
    for x, y in zip(a, b, strict=True):
        build.dims.tie(x, y)


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv
erfc exp exp2 expm1 floor ge gt igamma igammac igamma_grad_a imag integer_pow is_finite le le_to
lgamma log log1p logistic lt lt_to max min mul name ne neg nextafter not or polygamma
population_count pow pvary random_gamma_grad real reduce_precision regularized_incomplete_beta rem
round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign
sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
""".split()  # noqa: SIM905 - three lines a screen, not ninety

RULES: dict[str, Rule] = {
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
"""By the primitive's name. Those that hold programs are in `jaxpr/planner_model.py`."""
