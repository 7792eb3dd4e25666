"""Candidate places for a call: platforms, one device, layouts over a mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.capacity import part_bytes
from nbdist.parallel.placement.meshes import flat_mesh
from nbdist.parallel.placement.named_layouts import named
from nbdist.records.autoplace import DEFAULT, LeftOut
from nbdist.worker.jax.runtime import platforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device
    from jax.sharding import Sharding

ONE_DEVICE = "one device"


@dataclass(frozen=True)
class Candidate:
    """A place for a call.

    Attributes:
        name: short name.
        words: description.
        shardings: sharding of each leaf; None if the leaf does not move.
    """

    name: str
    words: str
    shardings: tuple[Sharding | None, ...]

    @functools.cached_property
    def stays(self) -> bool:
        """True if it moves nothing."""
        return not any(self.shardings)

    def moved(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of a call, moved to this place."""
        moving = [i for i, where in enumerate(self.shardings) if where is not None]
        there = jax.device_put([leaves[i] for i in moving], [self.shardings[i] for i in moving])
        after = list(leaves)
        for i, leaf in zip(moving, there, strict=True):
            after[i] = leaf
        return after


AS_CALLED = Candidate(DEFAULT, "as called", ())
"""The candidate if there is no choice."""


@dataclass(frozen=True)
class Offer:
    """The candidates of a call.

    Attributes:
        candidates: the candidates, `default` first.
        left_out: candidates that are not tried, with the reasons.
    """

    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]

    def called(self, name: str) -> Candidate:
        """Return the candidate of this name, which must exist."""
        return next(candidate for candidate in self.candidates if candidate.name == name)


@dataclass(frozen=True)
class Constraints:
    """Constraints on the places of a call.

    Attributes:
        mesh: the mesh of layouts; None if inputs are over no mesh.
        is_bound: True if the call must stay on that mesh.
        is_shared: True if the mesh spans several processes, which all make the call.
    """

    mesh: Mesh | None
    is_bound: bool
    is_shared: bool


def constraints_of(leaves: Sequence[Any]) -> Constraints:
    """Return the constraints for these inputs, under the mesh of `jax.set_mesh` if one is set."""
    current = jax.sharding.get_mesh()
    if not current.empty:
        return Constraints(current, is_bound=True, is_shared=current.is_multi_process)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    for sharding in shardings:
        if not sharding.is_fully_addressable:
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            return Constraints(mesh, is_bound=True, is_shared=True)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return Constraints(
        next((mesh for mesh in meshes if mesh.size > 1), flat_mesh(_own_devices())), False, False
    )


def _own_devices() -> list[Device]:
    default = next(iter(platforms.all_devices().values()))
    return [device for device in default if platforms.is_own(device)]


def offer(
    constraints: Constraints, leaves: Sequence[Any], arguments: Sequence[int], out_bytes: int
) -> Offer:
    """Return the candidates of a call.

    Args:
        constraints: constraints on the places.
        leaves: inputs of the call.
        arguments: number of the argument that each leaf belongs to.
        out_bytes: bytes of all outputs.
    """
    now = tuple(_place_of(leaf) for leaf in leaves)
    taken = [Candidate(DEFAULT, _default_words(leaves, now), (None,) * len(leaves))]
    left_out = []
    wanted = [] if constraints.is_bound else _single(now)
    for whole in (*wanted, *_sharded(constraints, leaves, arguments)):
        candidate = _without_what_stays(whole, constraints, leaves, now)
        why = (
            _same(candidate, taken)
            or _unsharded(whole)
            or _too_big(candidate, leaves, out_bytes, constraints)
        )
        if why:
            left_out.append(LeftOut(name=candidate.name, why=why))
        else:
            taken.append(candidate)
    return Offer(tuple(taken), tuple(left_out))


def _place_of(leaf: Any) -> Sharding:
    """Return the sharding of a leaf if the call is not moved."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding
    return SingleDeviceSharding(_own_devices()[0])


def _default_words(leaves: Sequence[Any], now: Sequence[Sharding]) -> str:
    devices = {d for where in now for d in where.device_set}
    are_new = not any(isinstance(leaf, jax.Array) for leaf in leaves)
    place = _words_of(devices) if devices else "as called"
    return f"as called, on {place}" if are_new else f"inputs stay on {place}"


def _words_of(devices: set[Device]) -> str:
    if len(devices) == 1:
        return platforms.name_of(next(iter(devices)))
    kinds = sorted({platforms.platform_of(device) for device in devices})
    return f"{len(devices)} x {', '.join(kinds)}"


def _single(now: Sequence[Sharding]) -> list[Candidate]:
    """Return candidates on one device of each platform.

    It is the device with most free memory on the default platform, the first one on others.
    """
    made = []
    used = {device for where in now for device in where.device_set}
    for number, (platform, members) in enumerate(platforms.all_devices().items()):
        own = [device for device in members if platforms.is_own(device)]
        if own:
            device = own[0] if number else _roomiest(own, used)
            name = platform if number else ONE_DEVICE
            there = SingleDeviceSharding(device)
            made.append(Candidate(name, f"all on {platforms.name_of(device)}", (there,) * len(now)))
    return made


def _roomiest(devices: Sequence[Device], used: set[Device]) -> Device:
    """Return the device with most free memory, preferably one with inputs. CPUs share memory."""
    return max(
        devices,
        key=lambda d: ((d.platform != "cpu" and platforms.free_bytes(d)) or 0, d in used),
    )


def _sharded(
    constraints: Constraints, leaves: Sequence[Any], arguments: Sequence[int]
) -> list[Candidate]:
    if constraints.mesh is None or constraints.mesh.size == 1:
        return []
    return [
        _layout(name, size, number, constraints.mesh, leaves)
        for number, size in enumerate(_batch_sizes(leaves, arguments))
        for name in ("batch", "model", "full")
    ]


def _batch_sizes(leaves: Sequence[Any], arguments: Sequence[int]) -> list[int]:
    """Return possible batch sizes: first dimensions of the last argument and the largest array.

    In `loss(parameters, batch)` the last argument is the batch, in `f(data, constants)` the
    largest.
    """
    arrays = [
        (argument, np.size(leaf), np.shape(leaf)[0])
        for argument, leaf in zip(arguments, leaves, strict=True)
        if np.ndim(leaf)
    ]
    if not arrays:
        return []
    last, largest = max(arrays), max(arrays, key=lambda array: array[1])
    return list(dict.fromkeys((last[2], largest[2])))


def _layout(name: str, size: int, number: int, mesh: Mesh, leaves: Sequence[Any]) -> Candidate:
    """Return a layout: `batch` and `full` shard the batch, `model` and `full` other leaves."""
    rows, others = {
        "batch": ("batch", "replicated"),
        "model": ("replicated", "model"),
        "full": ("batch", "full"),
    }[name]
    shardings = tuple(
        _named_or_replicated(rows if shape[:1] == (size,) else others, shape, mesh)
        for shape in map(np.shape, leaves)
    )
    words = {
        "batch": f"the {size:,} rows sharded",
        "model": f"all but the {size:,} rows sharded",
        "full": f"the {size:,} rows and all else sharded",
    }[name]
    over = " x ".join(f"{axis} {parts}" for axis, parts in mesh.shape.items())
    return Candidate(f"{name} {size}" if number else name, f"{words} over {over}", shardings)


def _named_or_replicated(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    try:
        return named(name, shape, mesh)
    except UsageError:  # it does not divide
        return named("replicated", shape, mesh)


def _without_what_stays(
    candidate: Candidate, constraints: Constraints, leaves: Sequence[Any], now: Sequence[Sharding]
) -> Candidate:
    """Return the candidate without moves of numbers, or of arrays that processes do not share."""
    shardings = tuple(
        wanted if wanted is not None and _moves(leaf, wanted, where, constraints) else None
        for leaf, wanted, where in zip(leaves, candidate.shardings, now, strict=True)
    )
    return replace(candidate, shardings=shardings)


def _moves(leaf: Any, wanted: Sharding, now: Sharding, constraints: Constraints) -> bool:
    if isinstance(leaf, jax.Array):
        can = not constraints.is_shared or not leaf.is_fully_addressable
        return can and not now.is_equivalent_to(wanted, leaf.ndim)
    is_there = now.is_equivalent_to(wanted, np.ndim(leaf))
    return isinstance(leaf, np.ndarray) and not constraints.is_shared and not is_there


def _unsharded(candidate: Candidate) -> str:
    """Return why a layout shards nothing; empty if it shards an array."""
    meshed = [where for where in candidate.shardings if isinstance(where, NamedSharding)]
    if not meshed or any(any(where.spec) for where in meshed):
        return ""
    return f"no dimension that it would shard divides by {meshed[0].mesh.size}"


def _same(candidate: Candidate, taken: Sequence[Candidate]) -> str:
    for other in taken:
        if all(
            a is b or (a is not None and b is not None and a == b)
            for a, b in zip(candidate.shardings, other.shardings, strict=True)
        ):
            return f"the same as {other.name}"
    return ""


def _too_big(
    candidate: Candidate, leaves: Sequence[Any], out_bytes: int, constraints: Constraints
) -> str:
    """Return why a candidate does not fit into memory; empty if it does.

    It counts the parts of moved inputs and the outputs. Between processes, trials show it.
    """
    moved = [
        (leaf, where) for leaf, where in zip(leaves, candidate.shardings, strict=True) if where
    ]
    if constraints.is_shared:
        return ""
    each = sum(part_bytes(np.shape(leaf), leaf.nbytes, where) for leaf, where in moved) + out_bytes
    devices = {device for _, where in moved for device in where.device_set}
    for device in sorted(devices, key=lambda d: d.id):
        free = platforms.free_bytes(device)
        sharing = len(devices) if device.platform == "cpu" else 1
        if free is not None and sharing * each > free:
            return (
                f"needs {sharing * each:,} bytes on {platforms.name_of(device)}, which has "
                f"{free:,} free"
            )
    return ""
