"""Engines of a running cluster, one for each rank, with ipyparallel's controller."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import ipyparallel

from nbdist.cluster import environment
from nbdist.cluster.child_registry import engine_name, is_engine, spare_name
from nbdist.cluster.controller import Controller
from nbdist.cluster.jax_coordinators import Coordinators
from nbdist.cluster.rank_places import Places
from nbdist.errors import StartError, WorkerError
from nbdist.records import RANK_VARIABLE, EngineLedger
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from nbdist.cluster.fleet import Fleet
    from nbdist.cluster.launcher import ForkServerEngineSetLauncher
    from nbdist.records import ClusterRequest

ENGINE_ARGS = (
    "--IPEngine.timeout=60",
    "--IPEngine.enable_nanny=False",  # the fork server is the parent and notices each end
    "--IPEngine.max_heartbeat_misses=50",  # each takes 0.1 + 0.5 s
    "--IPEngine.out_stream_factory=nbdist.worker.runtime.output.EngineStream",
    "--log-level=WARN",
)
_NO_CONTROLLER = "the cluster's controller is gone: run %dist_restart"


class Engines:
    """Controller, fork servers and engines of one cluster.

    Args:
        request: the request for the cluster.
        folder: an existing folder for connection files and logs.
        timeout_s: the limit of each phase of the start, in seconds.
        fleet: the fork servers of all hosts.

    Attributes:
        request: the request for the cluster.
        places: the place of each rank among the requested hosts.
        folder: the cluster's folder.
        timeout_s: the limit of each call on engines, in seconds.
        controller: ipyparallel's controller.
        coordinators: JAX's coordination services.
        fleet: the fork servers of all hosts.
    """

    def __init__(
        self, request: ClusterRequest, folder: Path, timeout_s: float, fleet: Fleet
    ) -> None:
        self.request = request
        self.places = Places(request, fleet)
        self.controller = Controller(folder, fleet)
        self.coordinators = Coordinators(fleet)
        self.fleet = fleet
        self.folder = folder
        self.timeout_s = timeout_s
        self._names: dict[int, str] = {}
        self._engine_ids: dict[int, int] = {}
        self._previous_ids: set[int] = set()
        self._spares: dict[int, str] = {}  # names by the place that each spare reports
        self._spares_made = 0

    @property
    def world_size(self) -> int:
        return len(self.places.numbers)

    # Starting.

    def ledger(self) -> EngineLedger:
        """Return the state that another process needs to take over the engines."""
        return EngineLedger(
            names=dict(self._names),
            ids=dict(self._engine_ids),
            previous_ids=tuple(self._previous_ids),
            spares=dict(self._spares),
            spares_made=self._spares_made,
            places=self.places.numbers,
            locations=self.fleet.locations,
            open_ports=self.fleet.open_ports,
        )

    def take_over(self, ledger: EngineLedger, controllers: list[int], *, answers: bool) -> None:
        """Use the engines that another process has started.

        Args:
            ledger: the state of the other process.
            controllers: the pids of the controller and its schedulers that still run.
            answers: True if the controller itself runs; it is the first pid then. Without it,
                cells can run, but no other operation.
        """
        self._names, self._engine_ids = dict(ledger.names), dict(ledger.ids)
        self._previous_ids, self.places.numbers = set(ledger.previous_ids), ledger.places
        self._spares, self._spares_made = dict(ledger.spares), ledger.spares_made
        self.fleet.take_over(ledger.locations, ledger.open_ports, self.controller.file("engine"))
        self.controller.take_over(controllers, answers=answers)
        self._engine_set = "taken"
        self.controller.new_launcher(
            engine_set_id=self._engine_set,
            engine_args=list(ENGINE_ARGS),
            fleet=self.fleet,
            names=[name for name in self.fleet.pids() if is_engine(name)],
            on=[],
            own_env=[],
            cores=[],
        )

    def resize(self, request: ClusterRequest) -> None:
        """Change the requested hosts while no engine runs."""
        self.request = request
        self.fleet.resize(request)
        self.places.resize(request)

    def reach(self, show_message: Callable[[str], None], *, leaves_out: bool, waits: bool) -> str:
        """Reconnect to lost hosts and start their fork servers; see `Places.reach`."""
        reached = self.places.reach(show_message, leaves_out=leaves_out, least=1, waits=waits)
        self.await_imports()
        return reached

    def await_imports(self) -> str:
        """Wait until the fork servers have imported the frameworks, and return the versions."""
        found = self.fleet.await_imports(self.timeout_s)
        alike = {
            ", ".join(f"{name} {versions.get(name, '')}" for name in self.request.frameworks)
            for versions in found.values()
        }
        return " | ".join(sorted(alike))

    def launch(self) -> str:
        """Fork the engines, and return a text with their pids."""
        self._names = {rank: engine_name(rank) for rank in range(self.world_size)}
        on, own_env, cores = zip(*self.places.own(), strict=True)
        self._engine_set = self.controller.cluster.start_engines_sync(
            self.world_size,
            fleet=self.fleet,
            names=list(self._names.values()),
            on=list(on),
            own_env=list(own_env),
            cores=list(cores),
            engine_args=list(ENGINE_ARGS),
        )
        self._spares.clear()
        return f"pids {' '.join(map(str, self.pids().values()))}"

    def fork_spares(self) -> None:
        """Fork spares up to the requested number, without waiting for them."""
        there, known = self._live_spares(), self._engine_ids
        self._spares = {p: n for p, n in self._spares.items() if p in there or p not in known}
        lost = self.fleet.lost()
        if not lost or any(host.key not in lost for host in self.request.hosts):
            while len(self._spares) < self.request.spares and self.can_restart():
                self._fork_spare(lost)

    def _fork_spare(self, lost: Collection[str]) -> None:
        while self.places.of_spare(self._spares_made) in lost:
            self._spares_made += 1
        env = environment.of_spare(self._spares_made)
        name = self._spares[int(env[RANK_VARIABLE])] = spare_name(self._spares_made)
        host = self.places.of_spare(self._spares_made)
        self._spares_made += 1
        self._launcher.fork(name, host, env, ())

    @property
    def _launcher(self) -> ForkServerEngineSetLauncher:
        launcher: ForkServerEngineSetLauncher = self.controller.cluster.engines[self._engine_set]
        return launcher

    def connect(self) -> str:
        """Wait until all engines and spares have registered, and learn the rank of each."""
        self._await_places([*range(self.world_size), *self._spares])
        self.controller.guard_schedulers()
        beside = f", and {len(self._spares)} spare" if self._spares else ""
        return f"{self.world_size} of {self.world_size}{beside}"

    def _await_places(self, places: Collection[int]) -> None:
        """Wait until the engines of these ranks and spares have reported their places.

        The hub still lists engines that were killed just before, but never reuses their ids.
        """

        def known() -> bool:
            self.raise_for_dead()
            self._request_places()
            return all(place in self._engine_ids for place in places)

        if not repeat_until(known, self.timeout_s):
            count = sum(place in self._engine_ids for place in places)
            raise StartError(f"{count} of {len(places)} engines registered in {self.timeout_s:g} s")

    def _request_places(self) -> None:
        """Ask newly registered engines for their places. Ignore engines that fail to respond."""
        fresh = sorted(
            set(self.controller.client.ids) - self._previous_ids - set(self._engine_ids.values())
        )
        if fresh:
            asked = self.controller.client[fresh].apply_async(os.getenv, RANK_VARIABLE)
            self._await(asked, self.raise_for_dead)
            answers = zip(asked.get(return_exceptions=True), fresh, strict=True)
            self._engine_ids |= {int(a): engine for a, engine in answers if isinstance(a, str)}

    def replace(self, ranks: Sequence[int]) -> list[int]:
        """Kill the engines of these ranks, and replace each by a spare or by a new engine.

        `fork_spares` replaces the spares that this uses up.

        Returns:
            The ranks that a spare has taken. Its environment and cores must still be set.
        """
        old = {rank: self._names[rank] for rank in ranks}
        self.fleet.kill(list(old.values()), self.timeout_s)
        for rank in ranks:
            self._previous_ids.add(self._engine_ids.pop(rank))
        taken = self.places.fitting(self._live_spares(), ranks)
        self._names |= {rank: self._spares.pop(place) for rank, place in taken.items()}
        forked = [rank for rank in ranks if rank not in taken]
        own = self.places.own()
        for rank in forked:
            self._names[rank] = engine_name(rank)
            self._launcher.fork(engine_name(rank), *own[rank])
        repeat_until(lambda: not set(self.dead()).intersection(forked), self.timeout_s)
        self._await_places([*taken.values(), *forked])
        for rank, place in taken.items():
            self._engine_ids[rank] = self._engine_ids.pop(place)
        return list(taken)

    def can_replace(self, ranks: Sequence[int]) -> bool:
        """Return True if each of these ranks has a running spare on its host."""
        return len(self.places.fitting(self._live_spares(), ranks)) == len(ranks)

    def call_spares(
        self, function: Callable[..., Any], *args: Any, but: Collection[int] = ()
    ) -> set[int]:
        """Call a function on spares, without waiting for them.

        Args:
            function: an importable function.
            args: its arguments.
            but: the places of spares to leave out.

        Returns:
            The places of the spares that were called. Unregistered spares are left out.
        """
        spares = set(self._live_spares()).difference(but)
        if not spares or not self.can_restart():
            return set()
        self._request_places()
        asked = spares & self._engine_ids.keys()
        for place in asked:
            self.controller.client[self._engine_ids[place]].apply_async(function, *args)
        return asked

    def _live_spares(self) -> list[int]:
        """Return the places of the spares that run."""
        running = self.fleet.pids()
        return [place for place, name in self._spares.items() if name in running]

    def restart(self) -> None:
        """Kill every engine. Call `launch` and `connect` afterwards."""
        self.coordinators.end(self.timeout_s)
        self.controller.cluster.stop_engines_sync()
        self._previous_ids |= set(self.controller.client.ids) | set(self._engine_ids.values())
        self._engine_ids = {}

    def stop(self) -> None:
        """End all processes, also in the middle of a start or after parts have died."""
        with contextlib.closing(self.fleet):
            self.controller.close()

    def leave(self) -> None:
        """Disconnect from all processes. They continue to run for another owner."""
        self.controller.close_client()
        self.fleet.leave()

    def detach(self, *, on: bool) -> None:
        """Set whether engines outlive this process."""
        self.fleet.detach(on=on)

    @property
    def is_requested(self) -> bool:
        """True if a notebook asks this process, a detached runner, to leave the cluster."""
        return self.fleet.home.state.is_requested

    def can_restart(self) -> bool:
        """Return True if the fork server and the controller, which new engines need, still run."""
        return self.fleet.home.runs() and self.controller.runs

    # Using.

    def pids(self) -> dict[int, int]:
        """Return the pid of every rank that runs."""
        running = self.fleet.pids()
        return {rank: running[name] for rank, name in self._names.items() if name in running}

    def dead(self) -> list[int]:
        """Return the ranks whose process has ended."""
        running = self.pids()
        return [rank for rank in range(self.world_size) if rank not in running]

    def memory(self) -> dict[int, int]:
        """Return the memory of each rank in bytes. Ranks on unresponsive hosts are left out."""
        seen = self.fleet.poll()
        return {rank: seen[name][0] for rank, name in self._names.items() if name in seen}

    def is_frozen(self, rank: int) -> bool:
        """Return True if a signal has stopped the rank's process (state T)."""
        return self.fleet.is_frozen(self._names[rank])

    def is_unreachable(self, rank: int) -> bool:
        """Return True if the connection to the rank's host is broken or being restored."""
        return self.places.host(rank) in self.fleet.disconnected_hosts()

    def describe_loss(self, rank: int) -> str:
        """Describe the end of a dead rank, for use after "rank N"."""
        return "was lost with its host" if self.is_unreachable(rank) else "died"

    def describe_silence(self, rank: int) -> str:
        """Describe the state of a rank that is not dead but sends nothing."""
        if self.is_unreachable(rank):
            return "its host cannot be reached, and nbdist tries again"
        return "its process runs, and nbdist waits for it"

    def raise_for_dead(self) -> None:
        """Raise StartError with the last log lines of the first dead rank, if there is one."""
        for rank in self.dead()[:1]:
            raise StartError(f"rank {rank} died during its start: {self.describe_end(rank)}")

    def log_tail(self, rank: int) -> str:
        return self.fleet.log_tail(self._names[rank])

    def describe_end(self, rank: int, lines: int = 20) -> str:
        return self.fleet.describe_end(self._names[rank], lines)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to ranks. It interrupts Python code, but not a collective."""
        for rank in ranks:
            self.fleet.signal(self._names[rank], signal.SIGINT)

    def apply(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Call an importable function on ranks in parallel.

        Args:
            function: an importable function.
            args: its arguments.
            ranks: the ranks; None for all.
            progress: returns the progress of the call. The time limit begins again with each
                change.

        Returns:
            The result of each rank, in the order of `ranks`.

        Raises:
            WorkerError: the function raised on a rank, a rank or the controller died, or the time
                ran out.
        """
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        return self._gather(self._view(chosen).apply_async(function, *args), chosen, progress)

    def _await(
        self,
        answer: Any,
        check: Callable[[], None],
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        deadline, reached = time.monotonic() + self.timeout_s, progress()
        while not answer.wait(0.1):
            check()
            if (now := progress()) != reached:
                deadline, reached = time.monotonic() + self.timeout_s, now
            if not self.can_restart():
                raise WorkerError(_NO_CONTROLLER)
            if time.monotonic() > deadline:
                raise WorkerError(f"no answer from the engines within {self.timeout_s:g} s")

    def _gather(
        self, answer: Any, ranks: Sequence[int], progress: Callable[[], object]
    ) -> list[Any]:
        self._await(answer, lambda: self.refuse_dead(ranks), progress)
        outcomes = list(answer.get(return_exceptions=True))
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if isinstance(outcome, ipyparallel.RemoteError):
                raise WorkerError(f"rank {rank}: {outcome.ename}: {outcome.evalue}")
        return outcomes

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit each call on engines to this many seconds within the block."""
        before, self.timeout_s = self.timeout_s, seconds
        try:
            yield
        finally:
            self.timeout_s = before

    def refuse_dead(self, ranks: Sequence[int]) -> None:
        """Raise WorkerError if one of these ranks is dead."""
        lost = [rank for rank in self.dead() if rank in ranks]
        if lost:
            raise WorkerError(
                f"rank {', '.join(map(str, lost))} is dead: run %dist_restart for new workers"
            )

    def _view(self, ranks: Sequence[int]) -> Any:
        self.refuse_dead(ranks)
        if self.controller.client is None:
            raise WorkerError(_NO_CONTROLLER)
        return self.controller.client[[self._engine_ids[rank] for rank in ranks]]
