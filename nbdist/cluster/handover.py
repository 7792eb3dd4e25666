"""What a process needs that takes a cluster over, in a file that only this user can read."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from nbdist.records import CLUSTER_ID, Estate
from nbdist.utils.files import read_file

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import CellRequest, CellUnderWay, Loss
    from nbdist.utils.files import LateFiles

ESTATE_FILE = "estate.json"
"""It holds the secret keys of the sockets that engines speak to."""

_MOST_BYTES = 64_000_000


class EstateFile:
    """`estate.json` in the cluster's folder, with which it goes.

    Args:
        folder: the cluster's.
        estate: as it is now; it is written.
        files: write it.

    Attributes:
        estate: as it is, or is being, written.
    """

    def __init__(self, folder: Path, estate: Estate, files: LateFiles) -> None:
        self.estate = estate
        self._folder = folder
        self._files = files
        self.update()

    def update(self, **changes: object) -> None:
        """Change fields, and write them all."""
        self.estate = msgspec.structs.replace(self.estate, **changes)
        self._files.replace(self._folder / ESTATE_FILE, msgspec.json.encode(self.estate), 0o600)

    def begin(self, cell: CellUnderWay, ran: tuple[str, ...]) -> None:
        """A cell is under way; it is written once it is `sent`, which is soon.

        Args:
            cell: which.
            ran: the texts of all cells so far, this one too.
        """
        self.estate = msgspec.structs.replace(self.estate, cell=cell, ran=ran)

    def opened(self, saved: tuple[str, ...]) -> None:
        """The checkpoints of the cell under way have the values of these names."""
        cell = self.estate.cell
        if cell is not None:
            self.update(cell=msgspec.structs.replace(cell, saved=saved))

    def shrunk(self, ranks: tuple[int, ...]) -> None:
        """The cell under way goes on with these alone; it is written once it is `sent`."""
        if self.estate.cell is not None:
            cell = msgspec.structs.replace(self.estate.cell, ranks=ranks)
            self.estate = msgspec.structs.replace(self.estate, cell=cell)

    def lose(self, loss: Loss) -> None:
        """Ranks are about to be replaced: it is known from here on, until a cell is `sent`."""
        self.update(loss=loss)
        self._files.settle()

    def sent(self, request: CellRequest, **changes: object) -> None:
        """The cell under way is about to be sent, as it is here: again, where it was healed.

        Of one that may outlive this process, it is known from here on.
        """
        cell = self.estate.cell
        if cell is not None:
            cell = msgspec.structs.replace(cell, request=request)
        self.update(cell=cell, cells=request.number, loss=None, **changes)
        if cell is not None and cell.detached:
            self._files.settle()

    def settle(self, **changes: object) -> None:
        """There is no cell under way any more."""
        former = self.estate
        self.update(cell=None, last=former.cell or former.last, **changes)


def read_estate(folder: Path) -> Estate:
    """What an owner has left in a cluster's folder.

    Raises:
        OSError: there is none, or it is another user's.
        msgspec.DecodeError: it is none, or another cluster's.
    """
    estate = msgspec.json.decode(read_file(folder / ESTATE_FILE, _MOST_BYTES), type=Estate)
    if (folder / ESTATE_FILE).stat().st_uid != os.getuid():
        raise PermissionError(f"{folder / ESTATE_FILE} is another user's")
    if estate.id != folder.name or not re.fullmatch(CLUSTER_ID, estate.id, re.ASCII):
        raise msgspec.DecodeError(f"{folder} is not the folder of cluster {estate.id}")
    return estate
