"""What a process needs that takes a cluster over: a file in the cluster's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records.base import Record, StrategyName
from nbdist.records.cluster import ClusterRequest, Device, Door, EngineBooks, WorkerHello
from nbdist.records.commands import CellRequest
from nbdist.records.runs import Writer
from nbdist.records.topology import Bench

if TYPE_CHECKING:
    from nbdist.records.cell_options import CellOptions


class CellUnderWay(Record, frozen=True):
    """A cell that was sent to ranks, or was about to be.

    Attributes:
        request: as it was sent.
        ranks: those that run it.
        run: the id of its run; empty where it is not kept.
        runs: the folder of the runs.
        saved: names whose values its checkpoints have.
    """

    request: CellRequest
    ranks: tuple[int, ...]
    run: str = ""
    runs: str = ""
    saved: tuple[str, ...] = ()

    @property
    def options(self) -> CellOptions:
        return self.request.options

    @property
    def detached(self) -> bool:
        """True if the cell continues when the kernel of the notebook ends."""
        return self.options.detach or self.options.saving is not None


class CollectiveState(Record, frozen=True):
    """What cells have left of a strategy's collectives on one rank.

    Attributes:
        under_way: a collective was launched, and has not ended.
        keys: the digest of the keys by which the next collectives of different ranks meet.
    """

    under_way: bool
    keys: int = 0


class CollectiveBooks(Record, frozen=True):
    """What the owner of a cluster knows of its collectives.

    Attributes:
        devices: of each rank.
        broken: strategies whose collectives were broken off.
        unchecked: strategies whose collectives a cell may have left out of step.
        heals: how often ranks were replaced among others that stayed.
        bench: what was measured of JAX's devices; None where nothing was.
    """

    devices: dict[int, tuple[Device, ...]] = msgspec.field(default_factory=dict)
    broken: tuple[StrategyName, ...] = ()
    unchecked: tuple[StrategyName, ...] = ()
    heals: int = 0
    bench: Bench | None = None


class Loss(Record, frozen=True):
    """Ranks were lost, and are not all replaced yet.

    Attributes:
        ranks: which.
        reason: what became of them, in a line.
    """

    ranks: tuple[int, ...]
    reason: str


class Estate(Record, frozen=True):
    """A cluster, as its owner leaves it.

    Attributes:
        id: the cluster's; names its folder.
        request: what was asked for.
        owner: the process that has it.
        keeper: the owner is no notebook's kernel.
        stream: where engines speak to.
        dispatch: where their cells come from.
        controllers: ipyparallel's controller, and then its schedulers.
        hellos: of the ranks; none before they are there.
        books: what is known of the engines.
        collectives: what is known of what is between them.
        loss: engines and collectives are as whoever began to heal them has left them; else None.
        cells: the number of the last cell that was sent.
        ran: their texts, in percent format.
        cell: the one under way; None between cells.
        last: the one that ran last.
    """

    id: str
    request: ClusterRequest
    owner: Writer
    stream: Door
    dispatch: Door
    keeper: bool = False
    controllers: tuple[Writer, ...] = ()
    hellos: tuple[WorkerHello, ...] = ()
    books: EngineBooks = EngineBooks()
    collectives: CollectiveBooks = CollectiveBooks()
    loss: Loss | None = None
    cells: int = 0
    ran: tuple[str, ...] = ()
    cell: CellUnderWay | None = None
    last: CellUnderWay | None = None
    version: int = 1
