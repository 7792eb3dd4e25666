"""Read-only views of a running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cells.parse import parse_ranks
from nbdist.cluster import tpu_slices
from nbdist.cluster.preflight import examine
from nbdist.errors import TransferError, UsageError, WorkerError
from nbdist.session.placement import locate
from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture
from nbdist.views.cluster.workers import status
from nbdist.worker.remote import preflight as rank_preflight
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from nbdist.cluster.engines import Engines
    from nbdist.records import ClusterRequest
    from nbdist.session.lifecycle import ClusterLifecycle
    from nbdist.views.cluster.devices import DevicesPicture
    from nbdist.views.cluster.workers import StatusPicture
    from nbdist.views.placement.picture import PlacementPicture


class ClusterInspection:
    """Read-only views of one cluster. `Cluster` documents the methods of the same names.

    Args:
        lifecycle: the cluster.
    """

    def __init__(self, lifecycle: ClusterLifecycle) -> None:
        self._lifecycle = lifecycle

    @property
    def world_size(self) -> int:
        return self._lifecycle.worker_group.world_size

    @property
    def _request(self) -> ClusterRequest:
        return self._lifecycle.handover.handover.request

    @property
    def is_requested(self) -> bool:
        """True if a notebook requests the cluster from this detached runner."""
        return self._lifecycle.worker_group.engines.is_requested

    @property
    def is_whole(self) -> bool:
        """True if all ranks are alive and engines can restart."""
        engines = self._lifecycle.worker_group.engines
        return engines.can_restart() and not engines.dead()

    def chosen(self, ranks: str | None) -> tuple[int, ...]:
        """Return the ranks that a text such as `0,2:4` names; all ranks without a text."""
        return parse_ranks(ranks, self.world_size) if ranks else tuple(range(self.world_size))

    def engines(self, ranks: Sequence[int]) -> Engines:
        """Return the engines, to call functions on these ranks.

        Raises:
            WorkerError: one of the ranks is dead, or still runs a cell.
        """
        self._lifecycle.runner.refuse_unready(ranks)
        return self._lifecycle.worker_group.engines

    def apply(
        self, function: Callable[..., Any], argument: Any, chosen: Sequence[int]
    ) -> list[Any]:
        """Call a function with an argument on ranks.

        Raises:
            WorkerError: one of the ranks is dead, or still runs a cell.
            TransferError: the call failed.
        """
        engines = self.engines(chosen)
        try:
            return engines.apply(function, argument, ranks=chosen)
        except WorkerError as error:
            raise TransferError(str(error)) from None

    def lacks(self, name: str) -> bool:
        """Return True if the name does not exist on some rank.

        Raises:
            WorkerError: a rank is dead, or still runs a cell.
            TransferError: the call failed.
        """
        return any(self.apply(transfer.missing, [name], self.chosen(None)))

    def show(self, names: Sequence[str]) -> PlacementPicture:
        hosts = {rank: hello.host for rank, hello in self._lifecycle.worker_group.hellos.items()}
        picture = locate(names, self.apply, hosts)
        self._lifecycle.file.show(picture.placement.names, picture.html())
        return picture

    def status(self) -> StatusPicture:
        return status(self._lifecycle.workers(), self._request.seed)

    def devices(self, *, bench: bool) -> DevicesPicture:
        self.engines(self.chosen(None))
        return self._lifecycle.devices(bench=bench)

    def logs(self, rank: int) -> str:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"no rank {rank}: use a rank from 0 to {self.world_size - 1}")
        text = self._lifecycle.logs.read(rank)
        beside = self._lifecycle.worker_group.engines.log_tail(rank)
        return text + (f"\n--- engine log, last lines ---\n{beside}\n" if beside else "")

    def hosts(self) -> HostsPicture:
        engines = self.engines(self.chosen(None))
        given = {host.key: host for host in self._request.hosts}
        ranks = range(self.world_size)
        keys = [engines.places.host(rank) for rank in ranks]
        return HostsPicture(
            facts=tuple(engines.apply(rank_preflight.facts)),
            addresses=tuple(engines.places.address(rank) for rank in ranks),
            environments=tuple(tuple(given[key].env) for key in keys),
            connections=tuple(map(engines.fleet.connection, keys)),
            tpus=tuple(given[key].tpu for key in keys),
            tpu=tpu_slices.describe(self._request.tpu) if self._request.tpu else "",
        )

    def examine(
        self, data: str, checkpoint: str, modules: Collection[str], *, bench: bool
    ) -> DoctorPicture:
        engines = self.engines(self.chosen(None))
        examination = examine(
            engines,
            self._request,
            links="each" if bench else "next",
            data=data,
            folder=checkpoint,
            modules=modules,
        )
        return DoctorPicture(examination)
