"""The collectives of a cluster's frameworks: how they are wired, and wired again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cells.grammar import strategies_of
from nbdist.cluster import wiring
from nbdist.records import CollectiveBooks, PjrtWiring
from nbdist.worker import setup

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.cluster.engines import Engines
    from nbdist.records import Bench, ClusterRequest, Device, StrategyName
    from nbdist.views.start import StartView

LOST: dict[StrategyName, str] = {
    "mirrored": (
        "TensorFlow's collectives are made anew before the next cell, and its variables and data "
        "sets are lost with the old ones: run the cells that make them again"
    ),
    "pjrt": "JAX's collectives are made anew before the next cell, and its arrays with them",
}

MOST_REBUILDS = 10
"""Of TensorFlow's in the same processes: each leaves some 98 threads and 41 MB behind."""

MOST_HEALS_IN_PLACE = 10
"""Of JAX's in the same processes: of each, the ranks that stay may keep what the step that was
broken off had in hand, and with it a connection to its coordinator, which has to run on."""

WORN = (
    f"TensorFlow's collectives were made anew {MOST_REBUILDS} times in these workers, and each "
    "left threads and memory behind: fresh workers come in their place, without what cells made"
)


class Collectives:
    """Wires the engines of one cluster.

    Args:
        request: what was asked for.
        engines: all of them are needed each time.

    Attributes:
        strategies: those that are built.
        devices: of each rank; those of the framework that was wired last.
        broken: strategies whose collectives were broken off; they are wired again before the
            next cell.
        bench: what was measured of JAX's devices; None where nothing was.
    """

    def __init__(self, request: ClusterRequest, engines: Engines) -> None:
        self._request = request
        self._engines = engines
        self.strategies = strategies_of(request)
        self.devices: dict[int, tuple[Device, ...]] = {}
        self.broken: set[StrategyName] = set()
        self.bench: Bench | None = None
        self._rebuilds = 0
        self._heals = 0

    def books(self) -> CollectiveBooks:
        """What there is to know of them, for a process that takes them over."""
        return CollectiveBooks(
            devices=dict(self.devices),
            broken=tuple(self.broken),
            rebuilds=self._rebuilds,
            heals=self._heals,
            bench=self.bench,
        )

    def take_over(self, books: CollectiveBooks) -> None:
        """Use what another process has wired."""
        self.devices, self.broken = dict(books.devices), set(books.broken)
        self._rebuilds, self._heals, self.bench = books.rebuilds, books.heals, books.bench

    def wire(self, phases: StartView) -> None:
        """Wire every framework that the cluster has."""
        if "tensorflow" in self._request.frameworks:
            phases.run("collectives ready (TensorFlow)", self._wire_mirrored)
        if "jax" in self._request.frameworks:
            phases.run("collectives ready (JAX)", self._wire_pjrt)

    @property
    def are_worn(self) -> bool:
        """Whether fresh processes are due, and not one more rebuild in these."""
        return "mirrored" in self.broken and self._rebuilds >= MOST_REBUILDS

    @property
    def heal_in_place(self) -> bool:
        """Whether ranks that are there may go on with others in the place of those that are not."""
        return self._heals < MOST_HEALS_IN_PLACE

    def heal(self, phases: StartView) -> None:
        """Wire JAX again, in which some ranks are new: nothing else is of use any more."""
        self._heals += 1
        self.broken.update(self.strategies)
        self.mend(phases, {"pjrt"})

    def mend(self, phases: StartView, strategies: Collection[StrategyName]) -> str:
        """Wire again what was broken off of these strategies, in the same processes.

        Returns:
            What is lost by that, in words.
        """
        lost: set[str] = set()
        told = []
        if "mirrored" in self.broken.intersection(strategies):
            phases.run("collectives ready (TensorFlow)", self._wire_mirrored)
            self.broken.discard("mirrored")
            self._rebuilds += 1
            told.append("without the variables and data sets of TensorFlow")
        if "pjrt" in self.broken.intersection(strategies):
            self._engines.apply(setup.leave_pjrt)
            phases.run("collectives ready (JAX)", self._wire_pjrt)
            lost.update(*self._engines.apply(setup.put_back_pjrt))
            self._engines.apply(setup.forget, tuple(lost))
            used = set[int]().union(*self._engines.apply(setup.peer_ports))
            self._engines.coordinators.end_unused(used)
            self.broken.discard("pjrt")
        told += [f"without {', '.join(f'`{name}`' for name in sorted(lost))}"] if lost else []
        return ", ".join(told)

    def _wire_mirrored(self) -> str:
        ports = self._engines.apply(setup.reserve_port)
        hosts = [self._engines.places.address(rank) for rank in range(len(ports))]
        hosts = [f"[{host}]" if ":" in host else host for host in hosts]
        addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        wired = wiring.mirrored(addresses, self._request.communication)
        devices = self._engines.apply(setup.build_mirrored, wired)
        self.devices = dict(enumerate(devices))
        return f"MultiWorkerMirroredStrategy over {sum(map(len, devices))} replicas"

    def _wire_pjrt(self) -> str:
        engines = self._engines
        port = engines.coordinators.start(engines.world_size, engines.timeout_s)
        hosts = [engines.places.host(rank) for rank in range(engines.world_size)]
        wired = {
            rank: PjrtWiring(
                service=engines.fleet.service(host, port),
                address=engines.places.address(rank),
                rank=rank,
                world_size=engines.world_size,
                cpu_devices=engines.places.cpu_devices(rank),
                compiled=f"{engines.fleet.folder(host)}/compiled",
                bench=self.bench,
            )
            for rank, host in enumerate(hosts)
        }
        devices = self._engines.apply(setup.build_pjrt, wired)
        self.devices = dict(enumerate(devices))
        return f"mesh of {sum(map(len, devices))} devices over {len(devices)} processes"
