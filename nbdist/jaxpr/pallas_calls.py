"""Pallas kernels in a program: the grid axes along which a call may be split.

XLA does not split a kernel. A call may run on a part of a grid axis if each step of this axis reads
and writes its own slices of the arrays, and nothing else passes from one step to the next. The
call's parameters are private to JAX. If they are not those that this module knows, no call is
split.
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from nbdist.jaxpr.core import DropVar
from nbdist.jaxpr.flatten import inner_equations
from nbdist.jaxpr.rules import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "pallas_call"
"""Name of the primitive."""

INNER = frozenset(
    (
        *("cond", "scan", "while", "jit", "pjit", "closed_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call"),
    )
)
"""Primitives with inner programs that kernels may contain."""

_IDS = frozenset(("program_id", "num_programs"))

OF_KERNELS = _IDS.union(
    ("get", "load", "masked_load"),
    ("swap", "addupdate", "masked_swap"),
    ("broadcast_to", "max_contiguous", "multiple_of", "roll"),
)
"""Primitives of kernels alone: none computes a product."""

_PARAMS = frozenset(
    (
        "compiler_params",
        "cost_estimate",
        "debug",
        "grid_mapping",
        "input_output_aliases",
        "interpret",
        "jaxpr",
        "mesh",
        "metadata",
        "name",
        "out_avals",
    )
)
_GRID_FIELDS = frozenset(
    (
        "block_mappings",
        "debug",
        "get_grid_indices",
        "grid",
        "grid_names",
        "index_map_avals",
        "index_map_tree",
        "local_grid_env",
        "num_index_operands",
        "num_inputs",
        "num_outputs",
        "scratch_avals",
        "vmapped_dims",
    )
)
_BLOCK_FIELDS = frozenset(
    (
        "array_aval",
        "block_shape",
        "debug",
        "index_map_jaxpr",
        "index_map_out_tree",
        "origin",
        "pipeline_mode",
        "transformed_block_aval",
        "transforms",
    )
)
"""Parameters and fields of JAX 0.10."""


class SplitAxis(NamedTuple):
    """A grid axis along which a call may be split.

    Attributes:
        axis: its number in the grid.
        size: its number of steps.
        ins: the dimension of each input that is split; None if each step reads the whole input.
        outs: the dimension of each result that is split.
    """

    axis: int
    size: int
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]


class SplitAxes(NamedTuple):
    """Result of the analysis of a call.

    Attributes:
        axes: the axes along which it may be split.
        obstacle: reason why the others may not be split; empty if all may.
    """

    axes: tuple[SplitAxis, ...]
    obstacle: str


class _NotSplitError(Exception):
    """An axis, or a call, cannot be split."""


def is_known(eqn: Any) -> bool:
    """Return True if the call has the form that this module knows, with a grid of known size."""
    params = eqn.params
    if params.keys() != _PARAMS or _fields(params["grid_mapping"]) != _GRID_FIELDS:
        return False
    grid = params["grid_mapping"]
    return all(isinstance(size, int) for size in grid.grid) and all(
        _fields(block) == _BLOCK_FIELDS for block in grid.block_mappings
    )


def label(eqn: Any) -> str:
    """Return the kernel's name; that of its function if it has none."""
    own = eqn.params.get("name")
    return str(own or getattr(eqn.params["jaxpr"].debug_info, "func_name", NAME))


def index_maps(eqn: Any) -> list[Jaxpr]:
    """Return the programs that compute which block each step has; JAX does not print them."""
    grid = eqn.params["grid_mapping"]
    return [block.index_map_jaxpr.jaxpr for block in grid.block_mappings] if is_known(eqn) else []


def split_axes(eqn: Any) -> SplitAxes:
    """Return the grid axes along which a call may be split."""
    try:
        _check_call(eqn)
    except _NotSplitError as error:
        return SplitAxes((), str(error))
    found, faults = [], []
    for axis, size in enumerate(eqn.params["grid_mapping"].grid):
        try:
            found.append(_split_axis(eqn, axis, size))
        except _NotSplitError as error:
            faults.append(f"grid axis {axis}: {error}")
    return SplitAxes(tuple(found), "; ".join(faults))


def with_parts(params: Mapping[str, Any], parts: Mapping[SplitAxis, int]) -> dict[str, Any]:
    """Return the parameters of a call for one of several equal parts of some axes."""
    grid = params["grid_mapping"]
    sizes, blocks, outs = list(grid.grid), list(grid.block_mappings), list(params["out_avals"])
    first = grid.num_inputs
    estimate = params["cost_estimate"]
    for axis, number in parts.items():
        sizes[axis.axis] //= number
        dims = [*axis.ins[grid.num_index_operands :], *axis.outs]
        blocks = [
            block if dim is None else block.replace(array_aval=_part(block.array_aval, dim, number))
            for block, dim in zip(blocks, dims, strict=True)
        ]
        outs = [_part(aval, dim, number) for aval, dim in zip(outs, axis.outs, strict=True)]
        estimate = estimate and _fewer(estimate, number)
    assert len(blocks) == first + len(outs)
    mapping = grid.replace(grid=tuple(sizes), block_mappings=tuple(blocks))
    given = {"grid_mapping": mapping, "out_avals": tuple(outs), "cost_estimate": estimate}
    return {**params, **given}


def _part(aval: Any, dim: int, parts: int) -> Any:
    shape = list(aval.shape)
    shape[dim] //= parts
    return aval.update(shape=tuple(shape))


def _fewer(estimate: Any, parts: int) -> Any:
    """Return JAX's estimate of the costs of a call for a part of it."""
    numbers = {name: value // parts for name, value in dataclasses.asdict(estimate).items()}
    return dataclasses.replace(estimate, **numbers)


def _fields(record: Any) -> frozenset[str]:
    is_record = dataclasses.is_dataclass(record)
    return frozenset(each.name for each in dataclasses.fields(record)) if is_record else frozenset()


def _check_call(eqn: Any) -> None:
    """Raise an error if no axis of a call may be split."""
    if not is_known(eqn):
        raise _NotSplitError("this form of a Pallas call is not known")
    params, grid = eqn.params, eqn.params["grid_mapping"]
    special = (params["mesh"], grid.grid_names, grid.get_grid_indices, grid.local_grid_env)
    if any(each is not None for each in special):
        raise _NotSplitError("its grid is over the cores of a device")
    if len(eqn.invars) != grid.num_index_operands + grid.num_inputs:
        raise _NotSplitError("it reads references from outside")
    if any(block.transforms or block.index_map_jaxpr.consts for block in grid.block_mappings):
        raise _NotSplitError("its blocks are transformed")
    kernel = params["jaxpr"]
    names = {inner.primitive.name for inner in chain(kernel.eqns, inner_equations(kernel))}
    other = names.difference(PLAIN, INNER, OF_KERNELS)
    if eqn.effects or other:
        raise _NotSplitError(f"the kernel uses {', '.join(sorted(other)) or 'side effects'}")
    own = kernel.invars[grid.num_index_operands + grid.num_inputs :]
    changes = (each for each in kernel.effects if type(each).__name__ != "ReadEffect")
    if any(getattr(each, "input", None) not in own for each in changes):
        raise _NotSplitError("the kernel writes to an input")


def _split_axis(eqn: Any, axis: int, size: int) -> SplitAxis:
    """Return an axis along which the call may be split.

    Raises:
        _NotSplitError: it may not be split along this axis.
    """
    grid = eqn.params["grid_mapping"]
    if size == 1:
        raise _NotSplitError("it has one step")
    _check_kernel(eqn, axis)
    dims = [_own_dimension(block, axis, size) for block in grid.block_mappings]
    ins = [*[None] * grid.num_index_operands, *dims[: grid.num_inputs]]
    outs = dims[grid.num_inputs :]
    if None in outs:
        raise _NotSplitError("several steps write the same block")
    if any(ins[one] != outs[other] for one, other in eqn.params["input_output_aliases"]):
        raise _NotSplitError("a result replaces an input with other blocks")
    return SplitAxis(axis, size, tuple(ins), tuple(dim for dim in outs if dim is not None))


def _check_kernel(eqn: Any, axis: int) -> None:
    """Raise an error if the kernel knows the step of an axis, or passes values to the next one."""
    grid = eqn.params["grid_mapping"]
    if axis in grid.vmapped_dims:  # the kernel does not know of it
        return
    own = own_axes(grid).index(axis)
    kernel = eqn.params["jaxpr"]
    if any(
        inner.primitive.name in _IDS and inner.params["axis"] == own
        for inner in chain(kernel.eqns, inner_equations(kernel))
    ):
        raise _NotSplitError("the kernel reads its program_id")
    declared = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
    is_parallel = len(declared) > own and _semantics(declared[own]) == "parallel"
    if grid.scratch_avals and not is_parallel:
        raise _NotSplitError(
            "steps share scratch memory, and dimension_semantics does not declare it parallel"
        )


def _semantics(declared: Any) -> str:
    """Return the name of an axis's semantics, which a kernel declares by name or as an enum."""
    return str(declared).rpartition(".")[2].lower()


def _own_dimension(block: Any, axis: int, size: int) -> int | None:
    """Return the dimension of an array of which each step has one element; None if none.

    Raises:
        _NotSplitError: the steps have other parts of the array.
    """
    jaxpr = block.index_map_jaxpr.jaxpr
    step = jaxpr.invars[axis]
    if any(atom is step for eqn in jaxpr.eqns for atom in eqn.invars):
        raise _NotSplitError("an index map computes with it")
    dims = [dim for dim, atom in enumerate(jaxpr.outvars) if atom is step]
    if not dims:
        return None
    shape = block.block_shape[dims[0]]
    one = type(shape).__name__ == "Squeezed" or (
        type(shape).__name__ == "Blocked" and shape.block_size == 1
    )
    if len(dims) > 1 or not one or block.array_aval.shape[dims[0]] != size:
        raise _NotSplitError("its blocks have several rows of an array")
    return dims[0]


def own_axes(grid: Any) -> list[int]:
    """Return the axes that `program_id` numbers: those that `jax.vmap` did not add."""
    return [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]


def in_context(params: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Return the parameters of a call for another context mesh.

    The kernel's types and operations name the context mesh for which the step was traced.

    Args:
        params: parameters of the call.
        context: context of an equation that was traced with the other mesh.
    """
    grid = params["grid_mapping"]
    blocks = tuple(
        block.replace(
            array_aval=_aval(block.array_aval, context),
            index_map_jaxpr=_program(block.index_map_jaxpr, context),
        )
        for block in grid.block_mappings
    )
    return {
        **params,
        "jaxpr": _program(params["jaxpr"], context),
        "grid_mapping": grid.replace(block_mappings=blocks),
        "out_avals": tuple(_aval(aval, context) for aval in params["out_avals"]),
    }


def _aval(aval: Any, context: Any) -> Any:
    """Return a type whose sharding is over the context mesh."""
    inner = getattr(aval, "inner_aval", None)
    if inner is not None:
        return aval.update(inner_aval=_aval(inner, context))
    if not hasattr(aval, "sharding"):
        return aval
    spec = jax.P(*[None] * aval.ndim)
    return aval.update(sharding=jax.NamedSharding(context.cur_abstract_mesh, spec))


def _program(value: Any, context: Any) -> Any:
    """Return a parameter with its programs and shardings in another context."""
    if isinstance(value, ClosedJaxpr):  # from JAX 0.11 on, each `Jaxpr`
        return ClosedJaxpr(_body(value.jaxpr, context), value.consts)
    if isinstance(value, Jaxpr):
        return _body(value, context)
    if isinstance(value, tuple):
        parts = [_program(part, context) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, jax.NamedSharding):
        return jax.NamedSharding(context.cur_abstract_mesh, value.spec)
    return value


def _body(jaxpr: Jaxpr, context: Any) -> Jaxpr:
    names: dict[Any, Any] = {}

    def made(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        kind = DropVar if isinstance(atom, DropVar) else Var
        names[atom] = names.get(atom) or kind(_aval(atom.aval, context))
        return names[atom]

    eqns = []
    for eqn in jaxpr.eqns:
        inner = {name: _program(each, context) for name, each in eqn.params.items()}
        if "ctx_mesh" in inner:
            inner["ctx_mesh"] = context.cur_abstract_mesh
        ins, outs = list(map(made, eqn.invars)), list(map(made, eqn.outvars))
        effects = _effects(eqn.effects, names)
        eqns.append(
            eqn.replace(invars=ins, outvars=outs, params=inner, effects=effects, ctx=context)
        )
    return jaxpr.replace(
        effects=_effects(jaxpr.effects, names),
        constvars=list(map(made, jaxpr.constvars)),
        invars=list(map(made, jaxpr.invars)),
        eqns=eqns,
        outvars=list(map(made, jaxpr.outvars)),
    )


def _effects(effects: Any, names: Mapping[Any, Any]) -> frozenset[Any]:
    """Return effects on references under their new variables."""
    return frozenset(
        type(each)(names[each.input]) if getattr(each, "input", None) in names else each
        for each in effects
    )
