"""The places where a call can be made: platforms, one device, layouts over a mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.capacity import part_bytes
from nbdist.parallel.placement.named_layouts import named
from nbdist.records import DATA
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
        name: of it.
        words: where it is.
        shardings: of each leaf; None where it stays.
    """

    name: str
    words: str
    shardings: tuple[Sharding | None, ...]

    @functools.cached_property
    def stays(self) -> bool:
        """Whether it moves nothing."""
        return not any(self.shardings)

    def moved(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs of a call where this candidate has them."""
        moving = [i for i, where in enumerate(self.shardings) if where is not None]
        there = jax.device_put([leaves[i] for i in moving], [self.shardings[i] for i in moving])
        after = list(leaves)
        for i, leaf in zip(moving, there, strict=True):
            after[i] = leaf
        return after


AS_CALLED = Candidate(DEFAULT, "as called", ())
"""Where there is no choice."""


@dataclass(frozen=True)
class Offer:
    """What there is to choose from.

    Attributes:
        candidates: `default` first.
        left_out: what is not worth a trial, and why.
    """

    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]

    def called(self, name: str) -> Candidate:
        """The candidate of this name, which there has to be."""
        return next(candidate for candidate in self.candidates if candidate.name == name)


@dataclass(frozen=True)
class Scene:
    """Where a call is made from.

    Attributes:
        mesh: that its layouts are over; None where inputs are over no mesh.
        is_bound: whether it has to stay on that mesh.
        is_shared: whether the mesh is of several processes, which all make the call.
    """

    mesh: Mesh | None
    is_bound: bool
    is_shared: bool


def scene_of(leaves: Sequence[Any]) -> Scene:
    """That of a call with these inputs, under the mesh of `jax.set_mesh`, if one is set."""
    current = jax.sharding.get_mesh()
    if not current.empty:
        return Scene(current, is_bound=True, is_shared=current.is_multi_process)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    for sharding in shardings:
        if not sharding.is_fully_addressable:
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            return Scene(mesh, is_bound=True, is_shared=True)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return Scene(next((mesh for mesh in meshes if mesh.size > 1), _own_mesh()), False, False)


def _own_mesh() -> Mesh:
    """One axis over this process's devices of the default platform."""
    return Mesh(np.array(_own_devices(), dtype=object), (DATA,), axis_types=(AxisType.Auto,))


def _own_devices() -> list[Device]:
    default = next(iter(platforms.all_devices().values()))
    return [device for device in default if platforms.is_own(device)]


def offer(scene: Scene, leaves: Sequence[Any], arguments: Sequence[int], out_bytes: int) -> Offer:
    """What a call can choose from.

    Args:
        scene: where it is made.
        leaves: its inputs.
        arguments: of each leaf, the number of the argument that it is of.
        out_bytes: of all its outputs.
    """
    now = tuple(_place_of(leaf) for leaf in leaves)
    taken = [Candidate(DEFAULT, _default_words(leaves, now), (None,) * len(leaves))]
    left_out = []
    wanted = [] if scene.is_bound else _single(now)
    for whole in (*wanted, *_sharded(scene, leaves, arguments)):
        candidate = _without_what_stays(whole, scene, leaves, now)
        why = (
            _same(candidate, taken)
            or _uncut(whole)
            or _too_big(candidate, leaves, out_bytes, scene)
        )
        if why:
            left_out.append(LeftOut(name=candidate.name, why=why))
        else:
            taken.append(candidate)
    return Offer(tuple(taken), tuple(left_out))


def _place_of(leaf: Any) -> Sharding:
    """Where a call as it is has it."""
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
    """All on one device: of the default platform the roomiest, the first of each other."""
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
    """The one with most memory free; among equals one that inputs are on. CPUs share theirs."""
    return max(
        devices,
        key=lambda d: ((d.platform != "cpu" and platforms.free_bytes(d)) or 0, d in used),
    )


def _sharded(scene: Scene, leaves: Sequence[Any], arguments: Sequence[int]) -> list[Candidate]:
    if scene.mesh is None or scene.mesh.size == 1:
        return []
    return [
        _layout(name, size, number, scene.mesh, leaves)
        for number, size in enumerate(_batch_sizes(leaves, arguments))
        for name in ("batch", "model", "full")
    ]


def _batch_sizes(leaves: Sequence[Any], arguments: Sequence[int]) -> list[int]:
    """What the batch's first dimension may be: that of the last argument, or of the largest array.

    In `loss(parameters, batch)` it is the last one's, in `f(data, constants)` the largest's.
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
    """The batch is cut in `batch` and `full`, all else in `model` and `full`."""
    rows, others = {
        "batch": ("batch", "replicated"),
        "model": ("replicated", "model"),
        "full": ("batch", "full"),
    }[name]
    shardings = tuple(
        _cut(rows if shape[:1] == (size,) else others, shape, mesh)
        for shape in map(np.shape, leaves)
    )
    words = {
        "batch": f"the {size:,} rows cut",
        "model": f"all but the {size:,} rows cut",
        "full": f"the {size:,} rows and all else cut",
    }[name]
    over = " x ".join(f"{axis} {parts}" for axis, parts in mesh.shape.items())
    return Candidate(f"{name} {size}" if number else name, f"{words} over {over}", shardings)


def _cut(name: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    try:
        return named(name, shape, mesh)
    except UsageError:  # it does not divide
        return named("replicated", shape, mesh)


def _without_what_stays(
    candidate: Candidate, scene: Scene, leaves: Sequence[Any], now: Sequence[Sharding]
) -> Candidate:
    """Numbers follow by themselves, and between processes nothing is sent but what they share."""
    shardings = tuple(
        wanted if wanted is not None and _moves(leaf, wanted, where, scene) else None
        for leaf, wanted, where in zip(leaves, candidate.shardings, now, strict=True)
    )
    return replace(candidate, shardings=shardings)


def _moves(leaf: Any, wanted: Sharding, now: Sharding, scene: Scene) -> bool:
    if isinstance(leaf, jax.Array):
        can = not scene.is_shared or not leaf.is_fully_addressable
        return can and not now.is_equivalent_to(wanted, leaf.ndim)
    is_there = now.is_equivalent_to(wanted, np.ndim(leaf))
    return isinstance(leaf, np.ndarray) and not scene.is_shared and not is_there


def _uncut(candidate: Candidate) -> str:
    """Why a layout is none."""
    meshed = [where for where in candidate.shardings if isinstance(where, NamedSharding)]
    if not meshed or any(any(where.spec) for where in meshed):
        return ""
    return f"no dimension that it would cut divides by {meshed[0].mesh.size}"


def _same(candidate: Candidate, taken: Sequence[Candidate]) -> str:
    for other in taken:
        if all(
            a is b or (a is not None and b is not None and a == b)
            for a, b in zip(candidate.shardings, other.shardings, strict=True)
        ):
            return f"the same as {other.name}"
    return ""


def _too_big(candidate: Candidate, leaves: Sequence[Any], out_bytes: int, scene: Scene) -> str:
    """Why it does not fit the memory. Between processes, each of which sees its own, trials tell.

    Counted are the inputs that move, in their parts, and the outputs once.
    """
    moved = [
        (leaf, where) for leaf, where in zip(leaves, candidate.shardings, strict=True) if where
    ]
    if scene.is_shared:
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
