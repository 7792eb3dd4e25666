"""`where="auto"`: what is large enough for the way goes to the quicker devices, if it fits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from nbdist.errors import UsageError
from nbdist.placing import fitting
from nbdist.placing.layouts import named
from nbdist.placing.leaves import leaves_of
from nbdist.placing.targets import Target
from nbdist.views import labels
from nbdist.worker import platforms
from nbdist.worker.crossing import own_crossing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Device
    from jax.sharding import Sharding

    from nbdist.placing.leaves import Leaf
    from nbdist.records import Crossing


@dataclass(frozen=True)
class Choice:
    """What was decided for a tree.

    Attributes:
        shardings: of each leaf.
        reason: why, in a sentence.
    """

    shardings: tuple[Sharding, ...]
    reason: str


class Automatic(Target):
    """Decides for all arrays of a tree together, when it is first asked.

    Args:
        tree: of arrays.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    @functools.cached_property
    def choice(self) -> Choice:
        """See `decide`."""
        leaves, _ = leaves_of(self._tree, "place")
        return decide(leaves)

    @functools.cached_property
    def _by_path(self) -> dict[str, Sharding]:
        leaves, _ = leaves_of(self._tree, "place")
        return {
            leaf.path: sharding
            for leaf, sharding in zip(leaves, self.choice.shardings, strict=True)
        }

    def sharding(self, leaf: Leaf) -> Sharding:
        return self._by_path[leaf.path]


def decide(leaves: Sequence[Leaf]) -> Choice:
    """Where this process's own devices hold them best.

    Arrays that are on devices of the default platform stay. Others go there where the largest is
    beyond the size from which on the way is worth it (see `crossing`), and else stay with a CPU.
    Where one device has no room, they are cut over all of them.

    Raises:
        UsageError: they fit nowhere.
    """
    own = jax.local_devices()
    if all(_is_on(leaf, own) for leaf in leaves):
        stay = tuple(leaf.value.sharding for leaf in leaves)
        return Choice(stay, f"already on {platforms.platform_of(own[0])}: nothing is moved")
    measured = own_crossing()
    if measured is None:
        return _alone(leaves, own, f"{platforms.name_of(own[0])} is the only device")
    large = max((leaf.nbytes for leaf in leaves), default=0)
    why = f"{_words(measured)}, and the largest array has {labels.size(large)}"
    host = jax.local_devices(backend="cpu")
    is_cpu = platforms.name_of(own[0]) == measured.home
    if large < measured.nbytes:
        return _room(leaves, own if is_cpu else host[:1], f"on one device, {measured.home}: {why}")
    if is_cpu:
        return _spread(leaves, own, f"cut over {len(own)} devices: {why}")
    return _room(leaves, own, f"on {measured.there}: {why}")


def _is_on(leaf: Leaf, own: Sequence[Device]) -> bool:
    return isinstance(leaf.value, jax.Array) and leaf.value.sharding.device_set <= set(own)


def _words(measured: Crossing) -> str:
    way = f"the way to {measured.there}"
    if measured.size is None:
        last = measured.ways[-1]
        return (
            f"{way} was worth it for no product that was measured, up to {last.size:,} x "
            f"{last.size:,} ({labels.brief(last.home_s)} on {measured.home}, "
            f"{labels.brief(last.there_s)} there)"
        )
    return (
        f"{way} is worth it from {labels.size(measured.nbytes)} on (measured: products of "
        f"{measured.size:,.0f} x {measured.size:,.0f})"
    )


def _alone(leaves: Sequence[Leaf], devices: Sequence[Device], reason: str) -> Choice:
    """On the device with most room.

    Raises:
        UsageError: there is not enough.
    """
    shardings = (SingleDeviceSharding(platforms.roomiest(devices)),) * len(leaves)
    fitting.check(leaves, shardings)
    return Choice(shardings, reason)


def _room(leaves: Sequence[Leaf], devices: Sequence[Device], reason: str) -> Choice:
    """On one device, or where it has no room, over all of them."""
    try:
        return _alone(leaves, devices, reason)
    except UsageError as full:
        if len(devices) == 1:
            raise
        return _spread(leaves, devices, f"cut over {len(devices)} devices: {full}")


def _spread(leaves: Sequence[Leaf], devices: Sequence[Device], reason: str) -> Choice:
    """Each leaf cut, if a dimension divides; else whole on each."""
    mesh = Mesh(devices, ("data",))
    shardings = tuple(_spread_sharding(leaf, mesh) for leaf in leaves)
    fitting.check(leaves, shardings)
    return Choice(shardings, reason)


def _spread_sharding(leaf: Leaf, mesh: Mesh) -> Sharding:
    try:
        return named("full", leaf.shape, mesh)
    except UsageError:
        return named("replicated", leaf.shape, mesh)
