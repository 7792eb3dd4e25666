"""Put data where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import jax
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement import capacity
from nbdist.parallel.placement.auto import Automatic
from nbdist.parallel.placement.capacity import is_small
from nbdist.parallel.placement.inside_jit import constrained, is_traced
from nbdist.parallel.placement.leaves import Leaf, leaves_of
from nbdist.parallel.placement.multi_process import move_all
from nbdist.parallel.placement.target_tree import targets_of
from nbdist.parallel.placement.targets import AUTO, is_there

if TYPE_CHECKING:
    from jax.sharding import Sharding


class Placed(NamedTuple):
    """What `place(..., explain=True)` returns.

    Attributes:
        tree: with its arrays where they were to be.
        reason: why there.
    """

    tree: Any
    reason: str


@overload
def place(
    tree: Any, where: Any = ..., *, mesh: Mesh | None = ..., explain: Literal[False] = ...
) -> Any: ...


@overload
def place(
    tree: Any, where: Any = ..., *, mesh: Mesh | None = ..., explain: Literal[True]
) -> Placed: ...


def place(tree: Any, where: Any = AUTO, *, mesh: Mesh | None = None, explain: bool = False) -> Any:
    """Put the arrays of a tree somewhere; what is there already is not copied.

    Values stay as they are, bit for bit; NumPy arrays and numbers become arrays of JAX, whose types
    have 32 bits unless `jax_enable_x64` is set: floating-point numbers are rounded to that, and
    integers that do not fit are refused. `nbdist.where` tells where they are.

    Args:
        tree: of arrays and numbers.
        where: one of these, or a tree of them with the tree's structure or its beginning:

            - `"auto"`: this process's devices, by size, free memory and the size from which on the
              way to them is worth it, which is measured (a second, once).
            - a `jax.Device`, or its name, `"cuda:0"`.
            - a platform, `"gpu"`, or the name of a host: the device there with most memory free.
            - a layout over the mesh: `"replicated"`, `"batch"`, `"model"`, `"full"`; see
              `nbdist.parallel.placement.named_layouts.named`.
            - a `PartitionSpec` over the mesh, or a `Sharding`.
        mesh: for layouts and specs; that of `jax.set_mesh`, else the strategy's, else one axis over
            all devices, if left out.
        explain: return the reason as well, as `Placed(tree, reason)`.

    Over several processes each has to call it, with the same values. Within `jax.jit`, and in step
    cells, it takes layouts, specs and `NamedSharding`s, and has the program lay out what it makes.

    Raises:
        UsageError: there is no such place, leaves are no arrays or were donated, sizes do not
            divide, or it does not fit: then it says how much is missing.
    """
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise UsageError(f"mesh={mesh!r} is no mesh: give one of nbdist.meshes(...)")
    if is_traced():
        made = constrained(tree, where, mesh)
        return Placed(made, f"as asked: {where}") if explain else made
    if isinstance(where, jax.Device) and not explain and is_small(tree):
        return _to_device(tree, where)
    leaves, structure = leaves_of(tree, "place")
    targets = targets_of(tree, len(leaves), where, mesh)
    shardings = _shardings(leaves, targets)
    capacity.check(leaves, shardings)
    arrays = _moved(leaves, shardings)
    placed = jax.tree.unflatten(structure, arrays)
    if not explain:
        return placed
    reasons = (_reason(target, where) for target in targets)
    return Placed(placed, "; ".join(dict.fromkeys(reasons)))


def _shardings(leaves: list[Leaf], targets: list[Any]) -> list[Sharding]:
    """Of each leaf.

    Raises:
        UsageError: leaves cannot be there; each of them.
    """
    found, wrong = [], dict[str, None]()
    for leaf, target in zip(leaves, targets, strict=True):
        try:
            found.append(target.sharding(leaf))
        except UsageError as error:
            wrong[str(error)] = None
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def _to_device(array: Any, device: jax.Device) -> jax.Array:
    """What `place` would do with one array, in half the time: small ones are moved often."""
    leaf, there = Leaf((), array, array.shape, array.nbytes), SingleDeviceSharding(device)
    if is_there(leaf, there) and array.committed:
        found: jax.Array = array
        return found
    return jax.device_put(array, _device(leaf, there) or there)


def _moved(leaves: list[Leaf], shardings: list[Sharding]) -> list[Any]:
    arrays = [leaf.value for leaf in leaves]
    to_move = [
        index
        for index, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
        if not (is_there(leaf, sharding) and leaf.value.committed)
    ]
    if jax.process_count() > 1:
        moved = move_all([leaves[i] for i in to_move], [shardings[i] for i in to_move])
    elif len(to_move) == 1:  # JAX takes twice as long for a list of one, or for a new sharding
        (index,) = to_move
        goal = _device(leaves[index], shardings[index]) or shardings[index]
        moved = [jax.device_put(leaves[index].value, goal)]
    else:
        moved = jax.device_put([arrays[i] for i in to_move], [shardings[i] for i in to_move])
    for index, array in zip(to_move, moved, strict=True):
        arrays[index] = array
    return arrays


def _device(leaf: Leaf, sharding: Sharding) -> jax.Device | None:
    """The one that it is, where that says all; else None."""
    if not isinstance(sharding, SingleDeviceSharding):
        return None
    (device,) = sharding.device_set
    usual = {None, device.default_memory().kind}
    now = leaf.value.sharding.memory_kind if isinstance(leaf.value, jax.Array) else None
    return device if {sharding.memory_kind, now} <= usual else None


def _reason(target: Any, where: object) -> str:
    return target.choice.reason if isinstance(target, Automatic) else f"as asked: {where}"
