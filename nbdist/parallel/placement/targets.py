"""Targets that `where` describes: devices, platforms, hosts, named layouts, shardings."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement.meshes import current_mesh, names_of
from nbdist.parallel.placement.named_layouts import LAYOUTS, named
from nbdist.views import formatting
from nbdist.worker.jax.runtime import platforms, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax import Device
    from jax.sharding import AbstractMesh

    from nbdist.parallel.placement.leaves import Leaf

AUTO = "auto"
USE_A_LIST = "a tuple is a PartitionSpec: use a list for a place for each entry of the tree"


class Target(ABC):
    """A place for leaves."""

    @abstractmethod
    def sharding(self, leaf: Leaf) -> Sharding:
        """Return the sharding of a leaf; its own if it is there already.

        Raises:
            UsageError: the leaf cannot be there.
        """

    def holds(self, leaf: Leaf) -> bool:
        """Return True if the leaf is there now."""
        if not isinstance(leaf.value, jax.Array):
            return False
        try:
            wanted = self.sharding(leaf)
        except UsageError:
            return False
        return is_there(leaf, wanted)


@dataclass(frozen=True)
class Given(Target):
    """A sharding, or one device."""

    wanted: Sharding

    def sharding(self, leaf: Leaf) -> Sharding:
        now = self.wanted
        if isinstance(now, NamedSharding) and not isinstance(now.mesh, Mesh):
            raise UsageError(
                f"{leaf.name}: {now} is over an abstract mesh: use a mesh with devices"
            )
        return checked(leaf, now)


@dataclass(frozen=True)
class Sharded(Target):
    """A `PartitionSpec` over a mesh; None for the current mesh."""

    spec: PartitionSpec
    mesh: Mesh | None

    def sharding(self, leaf: Leaf) -> Sharding:
        return checked(leaf, spec_over(self.spec, self.mesh or current_mesh()))

    def holds(self, leaf: Leaf) -> bool:
        return _over_its_mesh(leaf, lambda mesh: Sharded(self.spec, mesh), self.mesh)


@dataclass(frozen=True)
class OneOf(Target):
    """The device with most free memory, among those of a platform or a host."""

    devices: Sequence[Device]

    def sharding(self, leaf: Leaf) -> Sharding:
        if isinstance(leaf.value, jax.Array):
            now = leaf.value.sharding
            if len(now.device_set) == 1 and now.device_set <= set(self.devices):
                return now
        return SingleDeviceSharding(platforms.roomiest(self.devices))


@dataclass(frozen=True)
class Layout(Target):
    """A named layout over a mesh; None for the current mesh."""

    name: str
    mesh: Mesh | None

    def sharding(self, leaf: Leaf) -> Sharding:
        return layout_sharding(leaf, self.name, self.mesh or current_mesh())

    def holds(self, leaf: Leaf) -> bool:
        return _over_its_mesh(leaf, lambda mesh: Layout(self.name, mesh), self.mesh)


def _over_its_mesh(leaf: Leaf, over: Callable[[Mesh], Target], mesh: Mesh | None) -> bool:
    """Return True if a leaf is there, over its own mesh if none is given."""
    if not isinstance(leaf.value, jax.Array):
        return False
    now = leaf.value.sharding
    own = now.mesh if isinstance(now, NamedSharding) and isinstance(now.mesh, Mesh) else None
    try:
        return is_there(leaf, over(mesh or own or current_mesh()).sharding(leaf))
    except UsageError:
        return False


def layout_sharding(leaf: Leaf, name: str, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a named layout for a leaf.

    Raises:
        UsageError: a dimension does not divide; the error names the leaf.
    """
    try:
        return named(name, leaf.shape, mesh)
    except UsageError as error:
        raise UsageError(f"{leaf.path or 'the array'}: {error}") from None


def checked(leaf: Leaf, wanted: Sharding) -> Sharding:
    """Return the sharding if the array can have it.

    Raises:
        UsageError: It cannot; each entry of the spec that does not fit is reported.
    """
    if isinstance(wanted, NamedSharding):
        wrong = list(_faults(leaf.shape, wanted))
        if wrong:
            raise UsageError(f"{leaf.name}: {'; '.join(wrong)}")
        return wanted
    try:
        wanted.shard_shape(leaf.shape)
    except (ValueError, IndexError) as error:  # the object has no such axis
        raise UsageError(
            f"{leaf.name} does not fit {wanted}: {str(error).splitlines()[0]}"
        ) from None
    return wanted


def _faults(shape: tuple[int, ...], wanted: NamedSharding) -> Iterator[str]:
    """Report entries of the spec that do not fit the shape."""
    entries, sizes = tuple(wanted.spec), wanted.mesh.shape
    if len(entries) > len(shape):
        yield (
            f"the spec has {len(entries)} entries, and the array has "
            f"{formatting.count(len(shape), 'dimension')}: use at most one entry for each"
        )
        return
    for dimension, (size, entry) in enumerate(zip(shape, entries, strict=False)):
        axes = () if entry in {None, PartitionSpec.UNCONSTRAINED} else entry
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        parts = math.prod(sizes[name] for name in names)
        if size % parts:
            below, above = size // parts * parts, (size // parts + 1) * parts
            fitting = f"{below:,} or {above:,}" if below else f"{above:,}"
            one = len(names) == 1
            yield (
                f"dimension {dimension} has {formatting.count(size, 'element')}, and mesh "
                f"{'axis' if one else 'axes'} {' and '.join(map(repr, names))} "
                f"{'divides' if one else 'divide'} it by {parts}: use {fitting} elements, or None "
                "for this dimension"
            )


def is_there(leaf: Leaf, wanted: Sharding) -> bool:
    """Return True if each part of a leaf is where the sharding puts it."""
    if not isinstance(leaf.value, jax.Array):
        return False
    now = leaf.value.sharding
    if now.device_set != wanted.device_set:  # the usual case, faster than JAX
        return False
    alike: bool = now.is_equivalent_to(wanted, len(leaf.shape))
    return alike


def target_of(where: object, mesh: Mesh | None) -> Target:
    """Return the target for a `where` other than `auto`.

    Args:
        where: a device or its name, a platform, a host, a layout's name, a sharding, or a
            `PartitionSpec` over the mesh.
        mesh: for layouts and specs; None for the current mesh.

    Raises:
        UsageError: the place is unknown; the error lists known ones.
    """
    if isinstance(where, jax.Device):
        return Given(SingleDeviceSharding(where))
    if isinstance(where, Sharding):
        return Given(where)
    if isinstance(where, PartitionSpec):
        return Sharded(where, mesh)
    if isinstance(where, str):
        return Layout(where, mesh) if where in LAYOUTS else _called(where)
    raise UsageError(
        f"where={where!r} has type {type(where).__name__}, which is no place: use "
        f"a device, a name ({_choices()}), a sharding or a PartitionSpec"
    )


def spec_over(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a spec over a mesh.

    Raises:
        UsageError: the mesh lacks an axis, or the spec uses an axis twice or leaves one open.
    """
    if not isinstance(spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise UsageError(f"{spec!r} specifies no sharding: use a PartitionSpec of axes and None")
    used = Counter(a for axes in spec for a in ((axes,) if isinstance(axes, str) else axes or ()))
    unknown = [axis for axis in used if axis not in mesh.axis_names]
    names = ", ".join(f"{axis!r}{_near(axis, mesh.axis_names)}" for axis in unknown)
    wrong = [f"the mesh has no axis {names}"] if unknown else []
    wrong += [f"the spec has axis {axis!r} {n} times" for axis, n in used.items() if n > 1]
    if wrong:
        hint = f"; {USE_A_LIST}" if any(map(names_place, unknown)) else ""
        raise UsageError(
            f"spec {tuple(spec)}: {' and '.join(wrong)}: its axes are "
            f"{', '.join(f'{axis} ({size})' for axis, size in mesh.shape.items())}{hint}"
        )
    return NamedSharding(mesh, spec)


def _called(word: str) -> Target:
    devices = platforms.all_devices()
    for platform, members in devices.items():
        if platforms.is_called(platform, word):
            return OneOf([device for device in members if platforms.is_own(device)])
        for device in members:
            if word in {platforms.name_of(device), str(device)}:
                return Given(SingleDeviceSharding(device))
    default = next(iter(devices.values()))
    hosts = processes.hosts()
    there = [device for device in default if hosts[device.process_index] == word]
    if there:  # preferably of this process
        return OneOf([device for device in there if platforms.is_own(device)] or there)
    near = _near(word, [*_names(), AUTO, *LAYOUTS])
    raise UsageError(f"unknown place where={word!r}{near}: use one of {_choices()}")


def names_place(word: str) -> bool:
    """Return True if `where=word` is a place."""
    if word == AUTO or word in LAYOUTS or word in _names():
        return True
    return any(platforms.is_called(platform, word) for platform in platforms.all_devices())


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _names() -> list[str]:
    devices = platforms.all_devices()
    each = [platforms.name_of(device) for members in devices.values() for device in members]
    return [*devices, *each, *processes.hosts()]


def _choices() -> str:
    """Return the names of all places; of many devices, the first and the last."""
    devices = platforms.all_devices()
    platform_texts = [f"platform {name} ({names_of(members)})" for name, members in devices.items()]
    hosts = ", ".join(dict.fromkeys(processes.hosts()))
    return f"{AUTO}, {', '.join(LAYOUTS)}, {'; '.join(platform_texts)}; host {hosts}"
