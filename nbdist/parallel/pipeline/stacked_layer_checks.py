"""Checks that layers, rows and a mesh fit a pipeline; errors name the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nbdist.errors import UsageError
from nbdist.planner.graph.pipeline_schedule import layers_fault, rows_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax.sharding import Mesh


def check_options(mesh: Mesh, axis: str, *, micro: int, rounds: int) -> None:
    """Check the options of a pipeline.

    Raises:
        UsageError: options do not fit; all faults are listed.
    """
    wrong = [*_wrong_mesh(mesh, axis), *wrong_counts(micro=micro, rounds=rounds)]
    if not wrong and rounds > 1 and micro < mesh.shape[axis]:
        stages = mesh.shape[axis]
        wrong.append(
            f"micro={micro} is less than the {stages} stages, so with rounds={rounds} "
            f"the first stage would wait for the last: use micro={stages} or more, or "
            "rounds=1"
        )
    if wrong:
        raise UsageError("; ".join(wrong))


def check_layers(params: Any, stages: int, rounds: int) -> None:
    """Check that leaves of shape [layers, ...] divide into blocks.

    Raises:
        UsageError: they do not, or have different numbers of layers.
    """
    fault = layers_fault(_common(params, "params", "layers", 0), stages, rounds)
    if fault:
        raise UsageError(fault)


def check_blocks(params: Any, stages: int, rounds: int) -> None:
    """Check that leaves have the shape [rounds, stages, layers, ...].

    Raises:
        UsageError: leaves have other shapes; all are listed.
    """
    wrong = [
        f"{_name(path, 'params')} {list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.ndim(leaf) < 3 or jnp.shape(leaf)[:2] != (rounds, stages)
    ]
    if wrong:
        raise UsageError(
            f"with rounds={rounds} params have shapes [{rounds} rounds, {stages} "
            f"stages, layers, ...], but these differ: {', '.join(wrong)}: call params "
            "= apply.place(params) once, before the steps"
        )
    _common(params, "params", "layers", 2)


def check_rows(x: Any, micro: int) -> None:
    """Check that leaves of shape [rows, ...] divide into microbatches.

    Raises:
        UsageError: they do not, or have different numbers of rows.
    """
    fault = rows_fault(_common(x, "x", "rows", 0), micro)
    if fault:
        raise UsageError(fault)


def check_layer(
    layer: Callable[[Any, Any], Any], params: Any, x: Any, *, lead: int, micro: int
) -> None:
    """Check that a layer's output can be the input of the next layer.

    Args:
        layer: the layer function.
        params: leaves with `lead` dimensions before those of one layer.
        x: leaves of shape [rows, ...].
        lead: number of leading dimensions.
        micro: number of microbatches.

    Raises:
        UsageError: shapes or types differ.
    """

    def abstract(leaf: Any, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    one = jax.tree.map(lambda leaf: abstract(leaf, jnp.shape(leaf)[lead:]), params)
    rows = jax.tree.map(
        lambda leaf: abstract(leaf, (jnp.shape(leaf)[0] // micro, *jnp.shape(leaf)[1:])), x
    )
    made = jax.eval_shape(layer, one, rows)
    if _described(made) != _described(rows):
        raise UsageError(
            f"the layer returns {_described(made)} for {_described(rows)}: in a "
            "pipeline each layer's output is the next one's input: keep shapes and "
            "types, and change them before or after the pipeline"
        )


def _wrong_mesh(mesh: Mesh, axis: str) -> Iterator[str]:
    if axis not in mesh.shape:
        yield (
            f"axis={axis!r} is not in the mesh, whose axes are "
            f"{', '.join(f'{name} ({size})' for name, size in mesh.shape.items())}"
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(kind.name for kind in mesh.axis_types)
        yield f"the mesh's axes are {kinds}: make them Auto, as nbdist.meshes does"


def wrong_counts(**counts: int) -> Iterator[str]:
    """Yield the faults of named numbers that must be whole numbers from 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            yield f"{name}={count!r}: use a whole number from 1"


def _common(tree: Any, root: str, noun: str, dimension: int) -> int:
    """Return the common size of a dimension of all leaves.

    Raises:
        UsageError: the sizes differ.
    """
    counts = {
        _name(path, root): (*jnp.shape(leaf)[dimension:], None)[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    count = next(iter(counts.values()), None)
    if count is None or len(set(counts.values())) > 1:
        listed = ", ".join(f"{path} has {n}" for path, n in counts.items())
        raise UsageError(
            f"dimension {dimension} of every leaf of {root} must be its {noun}, equal "
            f"in all: {listed or 'there are no leaves'}"
        )
    return count


def _name(path: Sequence[Any], root: str) -> str:
    return f"{root}{jax.tree_util.keystr(tuple(path))}"


def _described(tree: Any) -> str:
    """Return shapes and types, such as `float32[4,8]`, in the structure of a tree."""
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
