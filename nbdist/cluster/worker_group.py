"""Workers of one cluster: start, identification, wiring, replacement and end of the ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING

from nbdist.cluster.collectives import Collectives
from nbdist.cluster.dispatcher import Dispatcher
from nbdist.cluster.engines import Engines
from nbdist.cluster.fleet import Fleet
from nbdist.cluster.forkserver.control_socket import KERNEL
from nbdist.cluster.preflight import check
from nbdist.records import WorkerHello, WorkerIdentity, WorkerState
from nbdist.telemetry.receiver import Receiver
from nbdist.utils.signals import interrupt_held
from nbdist.worker.remote import setup as engine_setup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from nbdist.records import BoundSocket, ClusterRequest, HandoverState, SocketAddress
    from nbdist.settings import Settings
    from nbdist.views.cluster.workers import StartView


_FIRST_STEP_S = 5.0
"""Time in which replaced ranks usually complete the next step. Spares are forked afterwards."""

_MAINTAIN_S = 1.0
_SPARES_S = 2.0
"""Time that a running cell may spend on calls to spares. A later call retries."""

_CONTROLLER_DIED = (
    "ipyparallel's controller has died. The running cell continues without it. Operations that "
    "need the controller fail until you run %dist_restart"
)


_log = logging.getLogger(__name__)


def new_fleet(
    request: ClusterRequest, folder: Path, settings: Settings, role: str = KERNEL
) -> Fleet:
    """Start the fork server of this machine; see `Fleet.start`."""
    return Fleet.start(request, folder, settings, role)


class WorkerGroup:
    """Engines of one cluster, with their collectives and their sockets in the notebook.

    Args:
        request: the request for the cluster.
        folder: an existing folder for connection files and logs.
        settings: the timeouts.
        fleet: the fork servers.

    Attributes:
        engines: the processes of the ranks.
        collectives: the collectives between the ranks.
        receiver: the receiver of their records; set by `open`.
        dispatcher: the sender of cells; set by `open`.
        hellos: the self-description of each rank.
    """

    receiver: Receiver
    dispatcher: Dispatcher

    def __init__(
        self, request: ClusterRequest, folder: Path, settings: Settings, fleet: Fleet
    ) -> None:
        self._request = request
        self._folder = folder
        self._settings = settings
        self.hellos: dict[int, WorkerHello] = {}
        self._detached = False
        self.engines = Engines(request, folder, settings.start_timeout_s, fleet)
        self.collectives = Collectives(request, self.engines)
        self._sockets = contextlib.ExitStack()
        self._modules: dict[str, None] = {}
        self._preloaded: set[int] = set()  # places of the spares that import these
        self._no_spares_until = 0.0
        self._has_controller = True
        self._maintained_at = 0.0

    def open(self, previous: HandoverState | None = None) -> None:
        """Open the sockets of the ranks. `receiver.start()` delivers the first record.

        Args:
            previous: the state that another process left, if it owned the cluster.
        """
        self.receiver = Receiver(previous.stream if previous else None)
        self._sockets.callback(self.receiver.close)
        self.dispatcher = Dispatcher(
            previous.dispatch if previous else None, is_remote=not self._request.is_local
        )
        self._sockets.callback(self.dispatcher.close)

    @property
    def world_size(self) -> int:
        return self.engines.world_size

    def detach(self, *, on: bool) -> None:
        """Set whether engines, including later replacements, outlive this process."""
        self._detached = on
        self.engines.detach(on=on)

    def close_sockets(self) -> None:
        """Process the records that have arrived, and close the sockets. Safe to call twice."""
        self._sockets.close()

    def leave(self) -> None:
        """Disconnect from the workers. They continue to run for another owner."""
        self.close_sockets()
        self.engines.leave()

    def _new_engines(self) -> Engines:
        role = self.engines.fleet.home.role
        fleet = new_fleet(self._request, self._folder, self._settings, role)
        return Engines(self._request, self._folder, self._settings.start_timeout_s, fleet)

    def start(self, phases: StartView) -> None:
        """Start the controller and all ranks. After a failure, `close` ends what was started."""
        if not self._request.is_local:
            reach = functools.partial(
                self.engines.places.reach, phases.show_message, leaves_out=True
            )
            phases.run("hosts reached", reach)
        phases.run("controller", self.engines.controller.start)
        phases.run("framework loaded", self.engines.await_imports)
        self._bring_up(phases)

    def restart(
        self,
        phases: StartView,
        places: Sequence[int],
        *,
        in_haste: bool = False,
        waits: bool = True,
    ) -> None:
        """Replace every engine by a new one.

        This imports the frameworks again only if the fork server or the controller is gone.

        Args:
            phases: shows the progress.
            places: the new places of the ranks; see `Places`.
            in_haste: True if a run waits for the restart. Spares are then forked later.
            waits: True to wait for a scheduler if hosts are lost.
        """
        self._no_spares_until = time.monotonic() + _FIRST_STEP_S if in_haste else 0.0
        if self.engines.can_restart():
            phases.run("old workers ended", self.engines.restart)
            if self.engines.request != self._request:
                self.engines.resize(self._request)
            self.engines.places.numbers = tuple(places)
            if self.engines.fleet.lost():
                leaves_out = not in_haste  # a recovery decides itself which ranks to leave out
                reach = functools.partial(
                    self.engines.reach, phases.show_message, leaves_out=leaves_out, waits=waits
                )
                phases.run("hosts reached", reach)
            self._bring_up(phases)
        else:
            phases.run("old workers ended", self.engines.stop)
            self.engines = self._new_engines()
            self.engines.detach(on=self._detached)
            self.engines.places.numbers = tuple(places)
            self.start(phases)

    def resize(self, phases: StartView, request: ClusterRequest) -> None:
        """Start new workers on these hosts. All old workers end, also on hosts that remain."""
        self._request = request
        self.dispatcher.is_remote = not request.is_local
        self.restart(phases, range(len(request.hosts)))

    def _bring_up(self, phases: StartView) -> None:
        """Fork the engines, identify the ranks, and connect their collectives."""
        phases.run("launched", self.engines.launch)
        self._preloaded.clear()
        self._has_controller = True
        self._maintain_spares()
        phases.run("connected", self.engines.connect)
        phases.run("workers ready", lambda: self._identify(range(self.world_size)))
        self.hellos = {rank: self.hellos[rank] for rank in range(self.world_size)}
        if self._request.frameworks and not self._request.is_local:
            phases.run("hosts checked", lambda: check(self.engines, self._request))
        bench, ranks = self.collectives.bench, len(self.collectives.devices)
        self.collectives = Collectives(self._request, self.engines)
        self.collectives.bench = bench if ranks == self.world_size else None
        self.collectives.wire(phases)

    def replace(self, ranks: Sequence[int]) -> str:
        """Replace the engines of these ranks. Their collectives are not connected yet.

        Returns:
            A description with the pid of each new engine.
        """
        self._no_spares_until = time.monotonic() + _FIRST_STEP_S
        spares = self.engines.replace(ranks)
        for rank in spares:
            self.engines.apply(
                engine_setup.take_place, *self.engines.places.own()[rank][1:], ranks=[rank]
            )
        self._identify(ranks)
        pids = self.engines.pids()
        named = (f"rank {rank} is pid {pids[rank]}" for rank in ranks)
        return ", ".join(named) + (", spare" if spares else "")

    def use_keras(self) -> None:
        """Import Keras in spares and in fork servers, because a cell uses it."""
        if "tensorflow" not in self._request.frameworks and "keras" not in self._modules:
            self.warm_spares(["keras"])
            self.engines.fleet.preload("keras")

    def warm_spares(self, modules: Iterable[str]) -> None:
        """Import in spares the modules that ranks have imported, without waiting."""
        fresh = dict.fromkeys(modules).keys() - self._modules.keys()
        if fresh:
            self._modules |= dict.fromkeys(sorted(fresh))
            self._preloaded.clear()
        if self._modules:
            called = self.engines.call_spares(
                engine_setup.load, tuple(self._modules), but=self._preloaded
            )
            self._preloaded |= called

    def maintain(self, show_message: Callable[[str], None]) -> None:
        """Maintain spares and check the controller. Call it regularly while a cell runs.

        Args:
            show_message: receives messages for the user.
        """
        now = time.monotonic()
        if now < self._maintained_at + _MAINTAIN_S:
            return
        self._maintained_at = now
        with interrupt_held():  # an interrupt here would leave an engine that nobody ends
            try:
                with self.engines.within(_SPARES_S):
                    self._maintain_spares()
            except Exception as error:  # noqa: BLE001 - the cell continues without spares
                _log.warning("spares could not be maintained: %s", error)
            runs = self.engines.controller.runs
        if self._has_controller and not runs:
            self._has_controller = False
            show_message(_CONTROLLER_DIED)

    def _maintain_spares(self) -> None:
        """Fork missing spares, but not shortly after a recovery, when ranks need the cores."""
        if time.monotonic() > self._no_spares_until:
            self.engines.fork_spares()
            self.warm_spares(())

    def seed(self) -> None:
        """Seed the random generators of all ranks as at the start."""
        self.engines.apply(engine_setup.seed, self._request.seed)

    def _address(self, bound_socket: BoundSocket, rank: int) -> SocketAddress:
        """Return the address of a socket of this machine, as seen from a rank."""
        return self.engines.fleet.bound_socket(self.engines.places.host(rank), bound_socket)

    def _identify(self, ranks: Sequence[int]) -> str:
        self.engines.fleet.add_open_ports(
            [self.receiver.bound_socket.port, self.dispatcher.bound_socket.port]
        )
        frameworks = self._request.frameworks
        hellos = self.engines.apply(engine_setup.hello, frameworks, ranks=ranks)
        self.hellos |= {hello.rank: hello for hello in hellos}
        identities = {
            rank: WorkerIdentity(
                rank=rank,
                world_size=self.world_size,
                stream=self._address(self.receiver.bound_socket, rank),
                dispatch=self._address(self.dispatcher.bound_socket, rank),
                seed=self._request.seed,
                telemetry=self._settings.telemetry,
                address=self.engines.places.address(rank) if self._has_gpus(rank) else "",
            )
            for rank in ranks
        }
        self.engines.apply(engine_setup.become, identities, ranks=ranks)
        self.dispatcher.await_connections(identities, self._settings.start_timeout_s)
        return ", ".join(sorted({hello.host for hello in hellos}))

    def _has_gpus(self, rank: int) -> bool:
        return bool(self.engines.fleet.gpus(self.engines.places.host(rank)))

    def states(self, busy: Collection[int], *, measure: bool) -> tuple[WorkerState, ...]:
        """Return the state of every rank.

        Args:
            busy: the ranks that run a cell.
            measure: True to measure the memory of each rank.
        """
        pids, devices = self.engines.pids(), self.collectives.devices
        memory = self.engines.memory() if measure else {}
        return tuple(
            WorkerState(
                rank=rank,
                host=hello.host,
                pid=hello.pid,
                versions=hello.versions,
                devices=devices.get(rank, ()),
                state="dead" if rank not in pids else "busy" if rank in busy else "idle",
                memory_bytes=memory.get(rank, 0),
            )
            for rank, hello in sorted(self.hellos.items())
        )

    def close(self) -> None:
        """End every process. Safe to call more than once."""
        with self._sockets:
            self.engines.stop()
