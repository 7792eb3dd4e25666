"""State that a process needs to take over a cluster: a file in the cluster's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nbdist.records.base import Record, StrategyName
from nbdist.records.cluster import BoundSocket, ClusterRequest, Device, EngineLedger, WorkerHello
from nbdist.records.commands import CellRequest
from nbdist.records.runs import Writer
from nbdist.records.topology import Bench

if TYPE_CHECKING:
    from nbdist.records.cell_options import CellOptions

HANDOVER_VERSION = 4
"""Format of the handover state. Version 1 (`estate.json`) was written before nbdist 0.2.0.

Version 2 named the fork server's socket and log `seed`. Version 3 had other commands of the fork
server: `look`, `beat` and `farewell`.
"""


class RunningCell(Record, frozen=True):
    """A cell that the kernel sent or is about to send to ranks.

    Attributes:
        request: the request.
        ranks: ranks that run it.
        run: id of its run; empty if the run is not stored.
        runs: folder of the runs.
        saved: names whose values its checkpoints contain.
        notebook_cell: id of the cell in its notebook; empty if the front end does not send it.
    """

    request: CellRequest
    ranks: tuple[int, ...]
    run: str = ""
    runs: str = ""
    saved: tuple[str, ...] = ()
    notebook_cell: str = ""

    @property
    def options(self) -> CellOptions:
        return self.request.options

    @property
    def detached(self) -> bool:
        """True if the cell continues when the kernel of the notebook ends."""
        return self.options.detach or self.options.saving is not None


class CollectiveState(Record, frozen=True):
    """State of a strategy's collectives on one rank after its cells.

    Attributes:
        under_way: a collective was launched and has not ended.
        keys: digest of the keys that match the next collectives of different ranks.
    """

    under_way: bool
    keys: int = 0


class CollectiveLedger(Record, frozen=True):
    """Collectives of a cluster, as its owner knows them.

    Attributes:
        devices: devices of each rank.
        broken: strategies with aborted collectives.
        unchecked: strategies whose ranks may disagree on the next collective.
        recoveries: replacements of ranks in a running process group.
        bench: measurements of JAX's devices; None if not measured.
    """

    devices: dict[int, tuple[Device, ...]] = msgspec.field(default_factory=dict)
    broken: tuple[StrategyName, ...] = ()
    unchecked: tuple[StrategyName, ...] = ()
    recoveries: int = 0
    bench: Bench | None = None


class LostRanks(Record, frozen=True):
    """A loss of ranks that are not all replaced yet.

    Attributes:
        ranks: the lost ranks.
        reason: cause of the loss, in one line.
    """

    ranks: tuple[int, ...]
    reason: str


class HandoverState(Record, frozen=True):
    """State of a cluster for its next owner.

    Attributes:
        id: id of the cluster and name of its folder.
        request: request for the cluster.
        owner: process that owns the cluster.
        detached_runner: the owner is not the kernel of a notebook.
        stream: socket for events of engines.
        dispatch: socket for cells.
        controllers: ipyparallel's controller, then its schedulers.
        hellos: first answers of the ranks; empty during the start.
        ledger: engines.
        collectives: collectives.
        loss: loss whose recovery was interrupted; None if there is none.
        cells: number of the last cell sent.
        ran: source of all cells, in percent format.
        cell: running cell; None between cells.
        last: cell that ran last.
        nbdist: version of nbdist that wrote the state.
        version: version of this format.
    """

    id: str
    request: ClusterRequest
    owner: Writer
    stream: BoundSocket
    dispatch: BoundSocket
    detached_runner: bool = False
    controllers: tuple[Writer, ...] = ()
    hellos: tuple[WorkerHello, ...] = ()
    ledger: EngineLedger = EngineLedger()
    collectives: CollectiveLedger = CollectiveLedger()
    loss: LostRanks | None = None
    cells: int = 0
    ran: tuple[str, ...] = ()
    cell: RunningCell | None = None
    last: RunningCell | None = None
    nbdist: str = ""
    version: int = HANDOVER_VERSION
