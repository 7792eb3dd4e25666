"""Results of reading one user object: an array with its location, or parts to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nbdist.records import HOST_MEMORY, OWN_RANK, LayoutKind, PlacedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


@dataclass(frozen=True)
class Mesh:
    """Mesh like `records.MeshShape`, but with devices instead of indices."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[PlacedDevice, ...]


@dataclass(frozen=True)
class ArrayLocation:
    """Layout like `records.Layout`, but with devices and mesh instead of indices."""

    kind: LayoutKind
    devices: tuple[PlacedDevice, ...] = ()
    blocks: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    axes: tuple[tuple[str, ...], ...] = ()
    spec: str = ""
    mesh: Mesh | None = None
    owners: int = 1


@dataclass(frozen=True)
class Found:
    """An array; `nbytes` is the size of the whole array, counted once."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: ArrayLocation


@dataclass(frozen=True)
class Inside:
    """Parts of an object, each with its relative path: `.weight`, `['w']`, `[0]`, or empty."""

    parts: Sequence[tuple[tuple[str, ...], Any]]


Reader = Callable[[Any], Found | Inside | None]
"""Function that reads an object; returns None for objects of another kind."""

ABSTRACT = ArrayLocation("abstract")
DELETED = ArrayLocation("deleted")
HOST = ArrayLocation("host", (PlacedDevice(OWN_RANK, HOST_MEMORY),), (0,))


class Table(Generic[Item]):
    """Set of items in order of insertion, each with an index."""

    def __init__(self) -> None:
        self._index: dict[Item, int] = {}

    @property
    def items(self) -> list[Item]:
        return list(self._index)

    def index(self, item: Item) -> int:
        return self._index.setdefault(item, len(self._index))
