"""Operations that treat each row of the batch alike, and their parameters for a part of the rows.

Operations that are not known to do so are refused: a row that depends on other rows would come out
differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from nbdist.jaxpr.fused_attention import PRODUCTS
from nbdist.jaxpr.pallas_calls import NAME, split_axes, with_parts
from nbdist.jaxpr.rules import ELEMENTWISE, named_dimensions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Rows = Mapping[Any, tuple[int, ...]]
    """The dimensions that are rows of the batch, by variable; other variables have no rows."""

    Rule = Callable[[Any, Rows], bool]


def is_by_row(eqn: Any, rows: Rows) -> bool:
    """Return True if each row of the results depends on the same row of the inputs alone."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return len({rows[var] for var in (*eqn.invars, *eqn.outvars) if _has(var, rows)}) == 1
    rule = _RULES.get(name)
    return rule is not None and rule(eqn, rows)


def why_not_by_row(eqn: Any) -> str:
    """Return the known reason why an operation does not treat each row alike; empty if none."""
    if eqn.primitive.name != NAME:
        return ""
    return split_axes(eqn).obstacle or "rows of the batch are not a grid axis"


def is_sum_over_rows(eqn: Any, rows: Rows) -> bool:
    """Return True if the result is a sum over rows: that of the results for parts of the rows."""
    name = eqn.primitive.name
    if name == "reduce_sum":
        return set(rows[eqn.invars[0]]) <= set(eqn.params["axes"])
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        sides = zip(eqn.invars, (left, right), strict=True)
        return all(_has(var, rows) and set(rows[var]) <= set(dims) for var, dims in sides)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        left, right = eqn.invars
        plain = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
        summed = (numbers.lhs_spec[1],), (numbers.rhs_spec[1],)
        return plain and (rows.get(left), rows.get(right)) == summed
    return False


def is_added_to_zeros(eqn: Any, rows: Rows) -> bool:
    """Return True if the operation adds each row at an index of its own to an array without rows.

    If that array is zeros, the result is a sum over rows, such as the gradient of an embedding
    table.
    """
    if eqn.primitive.name != "scatter-add":
        return False
    table, indices, updates = (_dims(var, rows) for var in eqn.invars)
    windows = set(eqn.params["dimension_numbers"].update_window_dims)
    last = eqn.invars[1].aval.ndim - 1
    return not table and bool(indices) and bool(updates - windows) and last not in indices


def is_linear(eqn: Any, sums: Sequence[bool], zeros: Sequence[bool]) -> bool:
    """Return True if an operation on parts of sums, added up, gives its result on the sums.

    Args:
        eqn: the operation.
        sums: for each input, True if it is a sum.
        zeros: for each input, True if it is zeros. Zeros count as a sum.
    """
    name = eqn.primitive.name
    every = all(is_sum or zero for is_sum, zero in zip(sums, zeros, strict=True))
    if name in _LINEAR:
        return True
    if name in ("add", "add_any", "sub", "concatenate"):
        return every
    if name in ("mul", "dot_general"):
        return sum(sums) == 1
    if name == "div":
        return sums[0] and not sums[1] and eqn.outvars[0].aval.dtype.kind in "fcV"
    if name == "select_n":
        return not sums[0] and all(s or z for s, z in list(zip(sums, zeros, strict=True))[1:])
    if name == "pad":
        return zeros[1]
    if name in ("dynamic_slice", "slice"):
        return sums[0] and not any(sums[1:])
    if name == "convert_element_type":
        wider = eqn.outvars[0].aval.dtype.itemsize >= eqn.invars[0].aval.dtype.itemsize
        return wider and eqn.params["new_dtype"].kind in "fV"
    return False


def with_fewer(eqn: Any, shapes: Sequence[tuple[int, ...]], given: Sequence[Any]) -> dict[str, Any]:
    """Return the parameters of an operation for a part of the rows.

    Args:
        eqn: the operation.
        shapes: shapes of its results for a part of the rows.
        given: shapes of its inputs for a part of the rows.
    """
    params = dict(eqn.params)
    name = eqn.primitive.name
    if name == NAME:
        return _kernel_with_fewer(eqn, shapes)
    if name == "broadcast_in_dim":
        params["shape"] = shapes[0]
    elif name == "reshape":
        params["new_sizes"] = shapes[0]
    elif name == "slice":
        whole = eqn.invars[0].aval.shape
        params["limit_indices"] = tuple(
            now if now != before else limit
            for now, before, limit in zip(given[0], whole, eqn.params["limit_indices"], strict=True)
        )
    elif name == "dynamic_slice":
        params["slice_sizes"] = shapes[0]
    elif name == "gather":
        whole = eqn.invars[0].aval.shape
        params["slice_sizes"] = tuple(
            now if now != before and size == before else size
            for now, before, size in zip(given[0], whole, eqn.params["slice_sizes"], strict=True)
        )
    return params


def _kernel_with_fewer(eqn: Any, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the parameters of a Pallas call for results of these shapes."""
    whole = [var.aval.shape for var in eqn.outvars]
    axes = split_axes(eqn).axes if list(shapes) != whole else ()
    parts = {axis: axis.size // shapes[0][axis.outs[0]] for axis in axes}
    return with_parts(eqn.params, {axis: number for axis, number in parts.items() if number > 1})


def _has(var: Any, rows: Rows) -> bool:
    return not isinstance(var, Literal) and bool(rows.get(var))


def _dims(var: Any, rows: Rows) -> set[int]:
    return set(rows[var]) if _has(var, rows) else set()


def _without(names: str) -> Rule:
    """Make a rule: the dimensions that a parameter names must not be rows."""

    def rule(eqn: Any, rows: Rows) -> bool:
        along = named_dimensions(eqn, names)
        return all(along.isdisjoint(_dims(var, rows)) for var in eqn.invars)

    return rule


def _dot(eqn: Any, rows: Rows) -> bool:
    """Return True if rows are a batch dimension of both operands, or a free dimension of one."""
    summed, batch = eqn.params["dimension_numbers"]
    left, right = (_dims(var, rows) for var in eqn.invars)
    if left & set(summed[0]) or right & set(summed[1]):
        return False
    if left and right:
        places = [
            sorted(batch[side].index(d) for d in own if d in batch[side])
            for side, own in enumerate((left, right))
        ]
        return left <= set(batch[0]) and right <= set(batch[1]) and places[0] == places[1]
    return True


def _conv(eqn: Any, rows: Rows) -> bool:
    numbers = eqn.params["dimension_numbers"]
    plain = eqn.params["batch_group_count"] == 1
    return (
        plain
        and _dims(eqn.invars[0], rows) == {numbers.lhs_spec[0]}
        and not _dims(eqn.invars[1], rows)
    )


def _attention(eqn: Any, rows: Rows) -> bool:
    """Return True if rows are whole sequences in all inputs and results."""
    arrays = (var for var in (*eqn.invars, *eqn.outvars) if 0 not in var.aval.shape)
    return all(_dims(var, rows) == {0} for var in arrays)


def _kernel(eqn: Any, rows: Rows) -> bool:
    """Return True if rows are a grid axis of a Pallas call, along which it may be split."""
    own = [_dims(var, rows) for var in (*eqn.invars, *eqn.outvars)]
    return any(
        own == [set() if dim is None else {dim} for dim in (*axis.ins, *axis.outs)]
        for axis in split_axes(eqn).axes
    )


def _whole(eqn: Any, rows: Rows) -> bool:
    """Return True if no rows are taken out of the array, and none are added."""
    (own,) = eqn.outvars[:1]
    sizes = {var.aval.shape[dim] for var in (*eqn.invars[:1], own) for dim in _dims(var, rows)}
    return _dims(eqn.invars[0], rows) == _dims(own, rows) and len(sizes) <= 1


def _pad(eqn: Any, rows: Rows) -> bool:
    own = _dims(eqn.invars[0], rows)
    return all(eqn.params["padding_config"][dim] == (0, 0, 0) for dim in own)


def _concatenate(eqn: Any, rows: Rows) -> bool:
    return eqn.params["dimension"] not in set().union(*(_dims(v, rows) for v in eqn.invars))


def _window(eqn: Any, rows: Rows) -> bool:
    windows = eqn.params["window_dimensions"]
    return all(windows[dim] == 1 for var in eqn.invars for dim in _dims(var, rows))


def _gather(eqn: Any, rows: Rows) -> bool:
    """Return True if indices with rows select whole rows, or from an operand with the same rows."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    table, indices = (_dims(var, rows) for var in eqn.invars)
    if table and not indices:
        moved = {*numbers.collapsed_slice_dims, *numbers.start_index_map}
        whole = all(eqn.params["slice_sizes"][dim] == sizes[dim] for dim in table)
        return whole and table.isdisjoint(moved)
    pairs = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    last = eqn.invars[1].aval.ndim - 1
    return last not in indices and {pairs.get(dim) for dim in table} <= indices


def _scatter(eqn: Any, rows: Rows) -> bool:
    """Return True if updates with rows go to the same rows of the operand, whole or batched."""
    numbers = eqn.params["dimension_numbers"]
    table, indices, updates = (_dims(var, rows) for var in eqn.invars)
    if table and not indices:
        moved = {*numbers.inserted_window_dims, *numbers.scatter_dims_to_operand_dims}
        return table.isdisjoint(moved) and updates <= set(numbers.update_window_dims)
    pairs = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    return bool(table) and {pairs.get(dim) for dim in table} == indices and bool(updates)


def _top_k(eqn: Any, rows: Rows) -> bool:
    """Return True if the last dimension, along which top_k sorts, is not rows."""
    return eqn.invars[0].aval.ndim - 1 not in _dims(eqn.invars[0], rows)


def _layout(eqn: Any, rows: Rows) -> bool:
    """Return True if rows stay rows in their order; they may be merged with other dimensions."""
    return all(_dims(var, rows) for var in (*eqn.invars, *eqn.outvars))


_MOVED = ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim")
_LINEAR = frozenset((*_MOVED, "neg", "copy", "copy_p", "real", "reduce_sum", "device_put", "name"))
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVED, _layout),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        _without("axes"),
    ),
    **dict.fromkeys(("argmax", "argmin"), _without("axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _without("axis")),
    **dict.fromkeys(PRODUCTS, _attention),
    NAME: _kernel,
    "rev": _without("dimensions"),
    "sort": _without("dimension"),
    "split": _without("axis"),
    "stack": _layout,
    "top_k": _top_k,
    "unstack": _without("axis"),
    "bitcast_convert_type": _whole,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "dynamic_slice": _whole,
    "gather": _gather,
    "pad": _pad,
    "slice": _whole,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
        ),
        _window,
    ),
    **dict.fromkeys(("scatter", "scatter-add"), _scatter),
}
