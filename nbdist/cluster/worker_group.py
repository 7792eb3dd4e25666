"""The workers of one cluster as ranks: started, met, wired, replaced, ended."""

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


_BEGINS_S = 5.0
"""Within it, ranks that were replaced make the next step, as a rule."""

_TEND_S = 1.0
_SPARES_S = 2.0
"""How long a cell waits for the answer of spares; they may be asked again."""

_ALONE = (
    "ipyparallel's controller has died: the cell goes on, for it does not pass through it; what "
    "needs it is refused from here on, until you type %dist_restart"
)


_log = logging.getLogger(__name__)


def new_fleet(
    request: ClusterRequest, folder: Path, settings: Settings, role: str = KERNEL
) -> Fleet:
    """What engines are forked from; see `Fleet.start`."""
    return Fleet.start(request, folder, settings, role)


class WorkerGroup:
    """Engines and what ties them to the notebook.

    Args:
        request: what was asked for.
        folder: for connection files and logs; must exist.
        settings: the bounds on waiting.
        fleet: what engines are forked from.

    Attributes:
        engines: the processes.
        collectives: between them.
        receiver: receives their records, once `open` was called.
        dispatcher: sends them cells, likewise.
        hellos: what each rank has said of itself.
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
        self._warm: set[int] = set()  # of spares, the places of those that import these
        self._hurries_until = 0.0
        self._has_controller = True
        self._tended_at = 0.0

    def open(self, former: HandoverState | None = None) -> None:
        """Open the sockets of the ranks. `receiver.start()` delivers the first record.

        Args:
            former: the state that another process left, if it owned the cluster.
        """
        self.receiver = Receiver(former.stream if former else None)
        self._sockets.callback(self.receiver.close)
        self.dispatcher = Dispatcher(
            former.dispatch if former else None, is_remote=not self._request.is_local
        )
        self._sockets.callback(self.dispatcher.close)

    @property
    def world_size(self) -> int:
        return self.engines.world_size

    def detach(self, *, on: bool) -> None:
        """Whether engines outlive this process, and those that come in their place."""
        self._detached = on
        self.engines.detach(on=on)

    def close_sockets(self) -> None:
        """Nobody is heard any more, once what has come is taken in. May be called twice."""
        self._sockets.close()

    def leave(self) -> None:
        """Let go of everything: it goes on for another owner."""
        self.close_sockets()
        self.engines.leave()

    def _new_engines(self) -> Engines:
        role = self.engines.fleet.home.role
        fleet = new_fleet(self._request, self._folder, self._settings, role)
        return Engines(self._request, self._folder, self._settings.start_timeout_s, fleet)

    def start(self, phases: StartView) -> None:
        """From nothing to ranks that have answered; `close` ends what there is, also halfway."""
        if not self._request.is_local:
            reach = functools.partial(self.engines.places.reach, phases.say, leaves_out=True)
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
        """Replace every engine by a fresh one.

        The frameworks are not imported again, unless the parent that has imported them, or the
        controller, is gone.

        Args:
            phases: shows how it goes.
            places: of the ranks from here on: see `Places`.
            in_haste: a run waits for it: spares come later.
            waits: for a scheduler, where hosts are lost.
        """
        self._hurries_until = time.monotonic() + _BEGINS_S if in_haste else 0.0
        if self.engines.can_restart():
            phases.run("old workers ended", self.engines.restart)
            if self.engines.request != self._request:
                self.engines.resize(self._request)
            self.engines.places.numbers = tuple(places)
            if self.engines.fleet.lost():
                leaves_out = not in_haste  # else who waits for it says what is done without
                reach = functools.partial(
                    self.engines.reach, phases.say, leaves_out=leaves_out, waits=waits
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
        """Have fresh workers on these hosts; those that had hosts which go on end, too."""
        self._request = request
        self.dispatcher.is_remote = not request.is_local
        self.restart(phases, range(len(request.hosts)))

    def _bring_up(self, phases: StartView) -> None:
        """From forked engines to ranks that have answered."""
        phases.run("launched", self.engines.launch)
        self._warm.clear()
        self._has_controller = True
        self._tend_spares()
        phases.run("connected", self.engines.connect)
        phases.run("workers ready", lambda: self._meet(range(self.world_size)))
        self.hellos = {rank: self.hellos[rank] for rank in range(self.world_size)}
        if self._request.frameworks and not self._request.is_local:
            phases.run("hosts looked at", lambda: check(self.engines, self._request))
        former, ranks = self.collectives.bench, len(self.collectives.devices)
        self.collectives = Collectives(self._request, self.engines)
        self.collectives.bench = former if ranks == self.world_size else None
        self.collectives.wire(phases)

    def replace(self, ranks: Sequence[int]) -> str:
        """Put engines in the place of ranks that are dead, or are to be; they are not wired yet.

        Returns:
            Which, in words.
        """
        self._hurries_until = time.monotonic() + _BEGINS_S
        spares = self.engines.replace(ranks)
        for rank in spares:
            self.engines.apply(
                engine_setup.take_place, *self.engines.places.own()[rank][1:], ranks=[rank]
            )
        self._meet(ranks)
        pids = self.engines.pids()
        named = (f"rank {rank} is pid {pids[rank]}" for rank in ranks)
        return ", ".join(named) + (", spare" if spares else "")

    def use_keras(self) -> None:
        """A cell has: what is forked later, and spares, are to have it imported."""
        if "tensorflow" not in self._request.frameworks and "keras" not in self._modules:
            self.warm_spares(["keras"])
            self.engines.fleet.preload("keras")

    def warm_spares(self, modules: Iterable[str]) -> None:
        """Have spares import what ranks have imported; they are not waited for."""
        fresh = dict.fromkeys(modules).keys() - self._modules.keys()
        if fresh:
            self._modules |= dict.fromkeys(sorted(fresh))
            self._warm.clear()
        if self._modules:
            asked = self.engines.ask_spares(engine_setup.load, tuple(self._modules), but=self._warm)
            self._warm |= asked

    def tend(self, say: Callable[[str], None]) -> None:
        """Look after what is beside the ranks; to be called now and then while they are at work.

        Args:
            say: tells who watches them.
        """
        now = time.monotonic()
        if now < self._tended_at + _TEND_S:
            return
        self._tended_at = now
        with interrupt_held():  # an engine that is half forked is nobody's
            try:
                with self.engines.within(_SPARES_S):
                    self._tend_spares()
            except Exception as error:  # noqa: BLE001 - whatever becomes of spares, the cell goes on
                _log.warning("spares were not looked after: %s", error)
            runs = self.engines.controller.runs
        if self._has_controller and not runs:
            self._has_controller = False
            say(_ALONE)

    def _tend_spares(self) -> None:
        """Have as many as were asked for. Who begins again has the cores for itself at first."""
        if time.monotonic() > self._hurries_until:
            self.engines.fork_spares()
            self.warm_spares(())

    def seed(self) -> None:
        """Seed the generators of all ranks as at the start."""
        self.engines.apply(engine_setup.seed, self._request.seed)

    def _address(self, bound_socket: BoundSocket, rank: int) -> SocketAddress:
        """Where a rank finds it."""
        return self.engines.fleet.bound_socket(self.engines.places.host(rank), bound_socket)

    def _meet(self, ranks: Sequence[int]) -> str:
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
            )
            for rank in ranks
        }
        self.engines.apply(engine_setup.become, identities, ranks=ranks)
        self.dispatcher.meet(identities, self._settings.start_timeout_s)
        return ", ".join(sorted({hello.host for hello in hellos}))

    def states(self, busy: Collection[int], *, measure: bool) -> tuple[WorkerState, ...]:
        """Every rank, as it is now; `busy` are those in a cell."""
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
        """End every process. May be called more than once."""
        with self._sockets:
            self.engines.stop()
