"""`where="auto"`: large arrays go to faster devices if they fit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.parallel.placement import capacity
from nbdist.parallel.placement.leaves import leaves_of
from nbdist.parallel.placement.meshes import current_mesh, flat_mesh
from nbdist.parallel.placement.named_layouts import named
from nbdist.parallel.placement.targets import Target
from nbdist.views import formatting
from nbdist.worker.jax.runtime import platforms
from nbdist.worker.profiling.crossover import own_crossing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device
    from jax.sharding import Mesh, Sharding

    from nbdist.parallel.placement.leaves import Leaf
    from nbdist.records import Crossing


@dataclass(frozen=True)
class Choice:
    """A decision for a tree.

    Attributes:
        shardings: sharding of each leaf.
        reason: the reason in a sentence.
    """

    shardings: tuple[Sharding, ...]
    reason: str


class Automatic(Target):
    """A target that decides for all arrays of a tree together, when it is first used.

    Args:
        tree: tree of arrays.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    @functools.cached_property
    def choice(self) -> Choice:
        """The decision; see `decide`."""
        leaves, _ = leaves_of(self._tree, "place")
        return decide(leaves)

    @functools.cached_property
    def _by_value(self) -> dict[int, Sharding]:
        leaves, _ = leaves_of(self._tree, "place")
        return {
            id(leaf.value): sharding
            for leaf, sharding in zip(leaves, self.choice.shardings, strict=True)
        }

    def sharding(self, leaf: Leaf) -> Sharding:
        return self._by_value[id(leaf.value)]


def decide(leaves: Sequence[Leaf]) -> Choice:
    """Decide on which devices arrays are placed.

    Arrays on devices of the default platform, or over several processes, stay. Others go to the
    default platform if the largest is above the size from which on the transfer pays off (see
    `crossing`). Otherwise they go to a CPU. If one device has no room, they are sharded over all.
    With several processes, a cell computes on the whole mesh, so arrays go there: replicated, or
    sharded if there is no room.

    Raises:
        UsageError: they fit nowhere.
    """
    own, mesh = jax.local_devices(), current_mesh()
    if all(_is_on(leaf, own) for leaf in leaves):
        stay = tuple(leaf.value.sharding for leaf in leaves)
        return Choice(stay, f"already on {platforms.platform_of(own[0])}: nothing is moved")
    if jax.process_count() > 1:
        return _over(leaves, mesh)
    measured = own_crossing()
    if measured is None:
        return _alone(leaves, own, f"{platforms.name_of(own[0])} is the only device")
    large = max((leaf.nbytes for leaf in leaves), default=0)
    why = f"{_words(measured)}, and the largest array has {formatting.size(large)}"
    host = jax.local_devices(backend="cpu")
    is_cpu = platforms.name_of(own[0]) == measured.home
    if large < measured.nbytes:
        return _room(leaves, own if is_cpu else host[:1], f"on one device, {measured.home}: {why}")
    if is_cpu:
        return _spread(leaves, flat_mesh(own), f"sharded over {len(own)} devices: {why}")
    return _room(leaves, own, f"on {measured.there}: {why}")


def _is_on(leaf: Leaf, own: Sequence[Device]) -> bool:
    """Return True if a leaf is on the devices with which this process computes."""
    if not isinstance(leaf.value, jax.Array):
        return False
    now: Sharding = leaf.value.sharding
    shared = jax.process_count() > 1
    return not now.is_fully_addressable if shared else now.device_set <= set(own)


def _over(leaves: Sequence[Leaf], mesh: Mesh) -> Choice:
    """Return shardings over a mesh of several processes; they shard if whole arrays do not fit."""
    whole = tuple(named("replicated", leaf.shape, mesh) for leaf in leaves)
    reason = f"on all {mesh.size} devices of the mesh, over which cells compute"
    try:
        capacity.check(leaves, whole)
    except UsageError as full:
        return _spread(leaves, mesh, f"sharded over the mesh's {mesh.size} devices: {full}")
    return Choice(whole, f"whole {reason}")


def _words(measured: Crossing) -> str:
    way = f"the transfer to {measured.there}"
    if measured.size is None:
        last = measured.ways[-1]
        return (
            f"{way} did not pay off for any measured product, up to {last.size:,} x "
            f"{last.size:,} ({formatting.duration(last.home_s)} on {measured.home}, "
            f"{formatting.duration(last.there_s)} there)"
        )
    return (
        f"{way} pays off from {formatting.size(measured.nbytes)} on (measured: "
        f"products of {measured.size:,.0f} x {measured.size:,.0f})"
    )


def _alone(leaves: Sequence[Leaf], devices: Sequence[Device], reason: str) -> Choice:
    """Return shardings on the device with most free memory.

    Raises:
        UsageError: there is not enough memory.
    """
    shardings = (SingleDeviceSharding(platforms.roomiest(devices)),) * len(leaves)
    capacity.check(leaves, shardings)
    return Choice(shardings, reason)


def _room(leaves: Sequence[Leaf], devices: Sequence[Device], reason: str) -> Choice:
    """Return shardings on one device, or over all devices if it has no room."""
    try:
        return _alone(leaves, devices, reason)
    except UsageError as full:
        if len(devices) == 1:
            raise
        return _spread(leaves, flat_mesh(devices), f"sharded over {len(devices)} devices: {full}")


def _spread(leaves: Sequence[Leaf], mesh: Mesh, reason: str) -> Choice:
    """Return shardings that shard each leaf if a dimension divides; others are replicated."""
    shardings = tuple(_spread_sharding(leaf, mesh) for leaf in leaves)
    capacity.check(leaves, shardings)
    return Choice(shardings, reason)


def _spread_sharding(leaf: Leaf, mesh: Mesh) -> Sharding:
    try:
        return named("full", leaf.shape, mesh)
    except UsageError:
        return named("replicated", leaf.shape, mesh)
