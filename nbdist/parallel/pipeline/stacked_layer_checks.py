"""Whether layers, rows and a mesh fit a pipeline: what is wrong, and what would be right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax.sharding import Mesh


def check_options(mesh: Mesh, axis: str, *, micro: int, rounds: int) -> None:
    """Whether a pipeline can be made.

    Raises:
        UsageError: it cannot; every reason.
    """
    wrong = [*_wrong_mesh(mesh, axis), *wrong_counts(micro=micro, rounds=rounds)]
    if not wrong and rounds > 1 and micro < mesh.shape[axis]:
        stages = mesh.shape[axis]
        wrong.append(
            f"micro={micro} is less than the {stages} stages, and with rounds={rounds} the first "
            f"stage would wait for the last: take micro={stages} or more, or rounds=1"
        )
    if wrong:
        raise UsageError("; ".join(wrong))


def check_layers(params: Any, stages: int, rounds: int) -> None:
    """Whether leaves of shape [layers, ...] divide into blocks.

    Raises:
        UsageError: they do not, or disagree.
    """
    layers, block = _common(params, "params", "layers", 0), rounds * stages
    if layers % block or not layers:
        times = f" x {rounds} rounds" if rounds > 1 else ""
        raise UsageError(
            f"{layers} layers do not divide into {stages} stages{times}: stack "
            f"{_near(layers, block)}"
        )


def check_blocks(params: Any, stages: int, rounds: int) -> None:
    """Whether leaves have the shape [rounds, stages, layers, ...].

    Raises:
        UsageError: they have not, or disagree; each that has not.
    """
    wrong = [
        f"{_name(path, 'params')} {list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jnp.ndim(leaf) < 3 or jnp.shape(leaf)[:2] != (rounds, stages)
    ]
    if wrong:
        raise UsageError(
            f"with rounds={rounds} params have shapes [{rounds} rounds, {stages} stages, layers, "
            f"...], and these have not: {', '.join(wrong)}: call params = apply.place(params) "
            "once, before the steps"
        )
    _common(params, "params", "layers", 2)


def check_rows(x: Any, micro: int) -> None:
    """Whether leaves of shape [rows, ...] divide into microbatches.

    Raises:
        UsageError: they do not, or disagree.
    """
    rows = _common(x, "x", "rows", 0)
    if rows % micro or not rows:
        fitting = [str(number) for number in range(1, rows + 1) if rows % number == 0]
        choice = f"take a micro of {', '.join(fitting)}, or " if fitting else "take "
        raise UsageError(
            f"{rows} rows do not divide into micro={micro}: {choice}{_near(rows, micro)} rows"
        )


def check_layer(
    layer: Callable[[Any, Any], Any], params: Any, x: Any, *, lead: int, micro: int
) -> None:
    """Whether a layer's output can be the next one's input.

    Args:
        layer: that is repeated.
        params: leaves with `lead` dimensions before those of one layer's.
        x: leaves of shape [rows, ...].
        lead: how many.
        micro: how many microbatches the rows are.

    Raises:
        UsageError: it cannot: shapes or types differ.
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
            f"the layer makes {_described(made)} of {_described(rows)}: in a pipeline each layer's "
            "output is the next one's input: keep shapes and types, and put what changes them "
            "before or behind the pipeline"
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
    """What is wrong with numbers, by their names, that count something."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            yield f"{name}={count!r}: take a whole number from 1"


def _common(tree: Any, root: str, noun: str, dimension: int) -> int:
    """The size of a dimension, which all leaves have in common.

    Raises:
        UsageError: they have not.
    """
    counts = {
        _name(path, root): (*jnp.shape(leaf)[dimension:], None)[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    count = next(iter(counts.values()), None)
    if count is None or len(set(counts.values())) > 1:
        said = ", ".join(f"{path} has {n}" for path, n in counts.items())
        raise UsageError(
            f"dimension {dimension} of every leaf of {root} is its {noun}, as many in each: "
            f"{said or 'there are no leaves'}"
        )
    return count


def _name(path: Sequence[Any], root: str) -> str:
    return f"{root}{jax.tree_util.keystr(tuple(path))}"


def _near(count: int, block: int) -> str:
    """The multiples next to a number."""
    below = count // block * block
    return f"{below} or {below + block}" if below else str(block)


def _described(tree: Any) -> str:
    """Shapes and types, as `float32[4,8]`; of a tree with its structure."""
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
