"""What a look at one object of the user's finds: an array and where it is, or parts to look at."""

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
    """As `records.MeshShape`, with the devices themselves."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[PlacedDevice, ...]


@dataclass(frozen=True)
class Where:
    """As `records.Layout`, with the devices and the mesh themselves."""

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
    """An array; `nbytes` of the whole, once."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    where: Where


@dataclass(frozen=True)
class Inside:
    """Parts, each with what leads to it from here: `.weight`, `['w']`, `[0]`; or with nothing."""

    parts: Sequence[tuple[tuple[str, ...], Any]]


Reader = Callable[[Any], Found | Inside | None]
"""None: not of its kind."""

ABSTRACT = Where("abstract")
DELETED = Where("deleted")
HOST = Where("host", (PlacedDevice(OWN_RANK, HOST_MEMORY),), (0,))


class Table(Generic[Item]):
    """Items, each once, by index."""

    def __init__(self) -> None:
        self._index: dict[Item, int] = {}

    @property
    def items(self) -> list[Item]:
        return list(self._index)

    def index(self, item: Item) -> int:
        return self._index.setdefault(item, len(self._index))
