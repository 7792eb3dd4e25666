"""What there is to see of a running cluster; `session.Cluster` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cells.options import cell_options
from nbdist.cells.parse import parse_ranks
from nbdist.cluster.preflight import examine
from nbdist.errors import TransferError, UsageError, WorkerError
from nbdist.session.placement import locate
from nbdist.session.tracing import trace_on
from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture
from nbdist.views.cluster.workers import status
from nbdist.worker.remote import preflight as rank_preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.execution.runner import Runner
    from nbdist.records import ClusterRequest, StepOptions, Trace, WorkerState
    from nbdist.session.lifecycle import ClusterLifecycle
    from nbdist.session.tracing import Traceable
    from nbdist.views.cluster.devices import DevicesPicture
    from nbdist.views.cluster.workers import StatusPicture
    from nbdist.views.placement.picture import PlacementPicture


class ClusterInspection:
    """Of what a process holds of a cluster."""

    request: ClusterRequest
    _held: ClusterLifecycle
    _worker_group: WorkerGroup
    _runner: Runner

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._worker_group.world_size

    def _chosen(self, ranks: str | None) -> tuple[int, ...]:
        """The ranks that were named; all, when none were."""
        return parse_ranks(ranks, self.world_size) if ranks else tuple(range(self.world_size))

    def _apply(
        self, function: Callable[..., Any], argument: Any, chosen: Sequence[int]
    ) -> list[Any]:
        self._runner.refuse_unready(chosen)
        try:
            return self._worker_group.engines.apply(function, argument, ranks=chosen)
        except WorkerError as error:
            raise TransferError(str(error)) from None

    def show(self, *names: str) -> PlacementPicture:
        """Where the arrays are that `params` or `model.optimizer`, say, lead to on the workers."""
        hosts = {rank: hello.host for rank, hello in self._worker_group.hellos.items()}
        picture = locate(names, self._apply, hosts)
        self._held.file.show(picture.placement.names, picture.html())
        return picture

    def workers(self, *, measure: bool = True) -> tuple[WorkerState, ...]:
        """Every rank, as it is now.

        Args:
            measure: also read how much memory each takes.
        """
        return self._held.workers(measure=measure)

    def status(self) -> StatusPicture:
        """The workers as a picture."""
        return status(self.workers(), self.request.seed)

    def devices(self, *, bench: bool = False) -> DevicesPicture:
        """The devices of all ranks; with `bench` measured, and steps planned with that."""
        self._runner.refuse_unready(self._chosen(None))
        return self._held.devices(bench=bench)

    def trace(
        self: Traceable,
        cell: str,
        *,
        ranks: str | None = None,
        strategy: str | None = None,
        step: StepOptions | None = None,
        keep: str = "",
    ) -> Trace:
        """Run a cell under JAX's profiler: where its time went, by operation, device and line.

        See `tracing_cells.trace_on`, also for what is raised.
        """
        options = cell_options({"ranks": ranks, "strategy": strategy, "step": step})
        return trace_on(self, cell, options, keep=keep)

    def logs(self, rank: int) -> str:
        """All that a rank wrote in cells, and the end of what its engine wrote beside them."""
        if not 0 <= rank < self.world_size:
            raise UsageError(f"there is no rank {rank}: ranks are 0 to {self.world_size - 1}")
        text = self._held.logs.read(rank)
        beside = self._worker_group.engines.log_tail(rank)
        return text + (f"\n--- engine log, last lines ---\n{beside}\n" if beside else "")

    def hosts(self) -> HostsPicture:
        """The host of each rank: its address, devices, Python, folder, and how it is reached."""
        self._runner.refuse_unready(self._chosen(None))
        engines, given = self._worker_group.engines, {host.key: host for host in self.request.hosts}
        ranks = range(self.world_size)
        keys = [engines.places.host(rank) for rank in ranks]
        return HostsPicture(
            facts=tuple(engines.apply(rank_preflight.facts)),
            addresses=tuple(engines.places.address(rank) for rank in ranks),
            environments=tuple(tuple(given[key].env) for key in keys),
            connections=tuple(map(engines.fleet.connection, keys)),
        )

    def examine(self, *, data: str = "", checkpoint: str = "") -> DoctorPicture:
        """Look at the hosts, and at the network between them: what would go wrong, and the cure.

        Args:
            data: a pattern of files that all hosts should have alike.
            checkpoint: a folder that all hosts should share.
        """
        self._runner.refuse_unready(self._chosen(None))
        asked = self._worker_group.engines, self.request
        return DoctorPicture(examine(*asked, measure=True, data=data, folder=checkpoint))
