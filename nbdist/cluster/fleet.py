"""Fork servers of all hosts, and the connections to them."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from nbdist.cluster import environment
from nbdist.cluster.child_registry import HOME, Children
from nbdist.cluster.forkserver.client import ForkServerProcess
from nbdist.cluster.forkserver.control_socket import KERNEL
from nbdist.cluster.forkserver.server import IF_THERE
from nbdist.cluster.payload_server import PayloadListener
from nbdist.cluster.remote_host.environment_install import HostEnvironments
from nbdist.cluster.remote_host.remote_forkserver import LOST_S, RemoteForkServer, ports_of
from nbdist.cluster.remote_host.ssh_connection import SshConnection
from nbdist.cluster.schedulers.reverse_connection import RendezvousClient
from nbdist.errors import NbdistError, OwnedError, StartError, UsageError
from nbdist.records import ForkServerRequest, SocketAddress
from nbdist.utils.polling import repeat_until
from nbdist.utils.sockets import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.remote_host.host_connection import HostConnection
    from nbdist.records import BoundSocket, ClusterRequest, ForkServerLocation, Framework, Host
    from nbdist.settings import Settings

PRELOADED = ("ipyparallel.engine.app", "nbdist.worker.engine", "nbdist.worker.remote.setup")

_ALONE, _MIRRORED = "nbdist.worker.tensorflow.without_keras", "nbdist.worker.tensorflow.strategy"
_KERAS_NEEDS = "nbdist.worker.keras.dependencies"
_STEPS: dict[Framework, tuple[str, ...]] = {
    "tensorflow": (_MIRRORED, "nbdist.worker.tensorflow.step"),
    "jax": ("nbdist.worker.jax.backend", "nbdist.worker.jax.step.step"),
}
_KERAS = (f"keras{IF_THERE}",)
"""Keras for fork servers with TensorFlow alone, whose engines always use it.

Fork servers with JAX alone import Keras when a cell uses it (`preload`). Fork servers with both
frameworks never do, because a cell selects the Keras backend.
"""

_MAX_PARALLEL = 32
_PROGRESS_S = 0.2


class Fleet(Children):
    """Fork servers of one cluster. Create it with `start`, or call `take_over` afterwards.

    Args:
        home: this machine's fork server. It also runs if no engine is on this machine.
        request: the request for the cluster.
        settings: the settings of fork servers, ssh and queues.

    Attributes:
        home: this machine's fork server.
        unreached: the reason of the last failed connection, by host key.
    """

    def __init__(
        self, home: ForkServerProcess, request: ClusterRequest, settings: Settings
    ) -> None:
        self.home = home
        self.unreached: dict[str, str] = {}
        self._settings = settings
        self._remote: dict[str, RemoteForkServer] = {}
        self._hosts: dict[str, Host] = {}
        self._rendezvous: RendezvousClient | None = None
        if request.batch is not None:
            self._rendezvous = RendezvousClient(request.batch, home, settings.queue_wait_s)
        self._environments: HostEnvironments | None = None
        if request.install:
            self._environments = HostEnvironments(home.folder, settings.wheels_path)
        self.resize(request)
        self._controller: dict[str, Any] = {}
        self._open_ports: set[int] = set()
        self._payloads: PayloadListener | None = None

    @classmethod
    def start(
        cls,
        request: ClusterRequest,
        folder: Path,
        settings: Settings,
        role: str = KERNEL,
    ) -> Self:
        """Start this machine's fork server. Call `reach` next to start the others.

        Args:
            request: the request for the cluster.
            folder: the cluster's folder, with a subfolder `log`.
            settings: the settings of fork servers, ssh and queues.
            role: the role of this process.
        """
        here = any(not host.name for host in request.hosts)
        modules = _modules(request) if here else ()
        env = environment.shared(request) | _env_here(request)
        home = ForkServerProcess.start(modules, env, folder, settings.return_grace_s, role)
        return cls(home, request, settings)

    def missing_hosts(self, request: ClusterRequest) -> list[str]:
        """Return the hosts of a request that this fleet does not contain."""
        return [key for key in _others(request) if key not in self._hosts]

    def require(
        self, request: ClusterRequest, timeout_s: float, show_message: Callable[[str], None]
    ) -> str:
        """Connect to the new hosts of a request, before `resize` removes the old ones.

        Args:
            request: the request that will replace the current one.
            timeout_s: the limit of the imports on a host, in seconds.
            show_message: receives progress messages.

        Returns:
            The new hosts, as text.

        Raises:
            UsageError: a host cannot be reached. The fleet is unchanged.
        """
        before, fresh = self._hosts, self.missing_hosts(request)
        self._hosts = {**before, **_others(request)}
        with contextlib.ExitStack() as undo:
            undo.callback(self._disconnect, fresh, before)
            try:
                self._request_hosts(fresh, show_message)
            except StartError as error:
                raise UsageError(str(error)) from None
            failed = self._start_all(
                fresh, lambda key: self._start_whole(key, timeout_s), show_message
            )
            if failed:
                raise UsageError("\n".join(f"{key}: {reason}" for key, reason in failed.items()))
            undo.pop_all()
        return ", ".join(fresh)

    def _start_whole(self, key: str, timeout_s: float) -> None:
        self._start(key)
        self._remote[key].await_ready(timeout_s)

    def _disconnect(self, keys: Iterable[str], hosts: dict[str, Host]) -> None:
        """Disconnect from hosts that `require` was about to add."""
        self._hosts = hosts
        for key in keys:
            if key in self._remote:
                self._remote.pop(key).close()
        self._release(keys)

    def resize(self, request: ClusterRequest) -> None:
        """Change the requested hosts, and disconnect from those that are no longer requested."""
        self._request = request
        before, self._hosts = self._hosts, _others(request)
        others = [
            k for k, fork_server in self._remote.items() if self._hosts.get(k) != fork_server.host
        ]
        self._each(others, lambda key: self._remote.pop(key).close())
        self._release(before.keys() - self._hosts.keys())

    def _release(self, keys: Iterable[str]) -> None:
        """Return hosts to the scheduler, if one provides them."""
        if self._rendezvous is not None and (places := [self._place(key) for key in keys]):
            self._rendezvous.release(places)

    def take_over(
        self,
        locations: Mapping[str, ForkServerLocation],
        open_ports: Iterable[int],
        controller: Path,
    ) -> None:
        """Become the owner of the fork servers that another process has started on other hosts.

        `unreached` contains the hosts whose fork servers are gone.

        Args:
            locations: the location of each fork server, by host key.
            open_ports: the ports of this machine that are forwarded to the hosts.
            controller: the path of ipyparallel's connection file for engines.
        """
        self._open_ports.update(open_ports)
        with contextlib.suppress(OSError):  # the controller is gone
            self._controller = json.loads(controller.read_text())
        ports = [*self._open_ports, *ports_of(self._controller)]

        def own(key: str) -> None:
            fork_server = RemoteForkServer.take_over(
                self._link(key), locations[key], self.home, ports
            )
            self._remote[key] = fork_server
            if self._controller:
                fork_server.forward_controller(self._controller)

        self.unreached = self._each([key for key in self._hosts if key in locations], own)

    def reach(self, show_message: Callable[[str], None], *, waits: bool = True) -> str:
        """Connect to all lost hosts in parallel, and start fork servers there.

        Args:
            show_message: receives progress messages.
            waits: True to wait in a scheduler's queue. If all hosts are lost, this always waits.

        Returns:
            A description of the outcome. `unreached` contains the reason for each failed host.

        Raises:
            StartError: the scheduler provides no hosts.
        """
        lost = self.lost()
        may_wait = waits or len(lost) == len(self._hosts)  # without hosts, nothing can continue
        job, have_connected = self._request_hosts(lost, show_message) if may_wait else ("", False)
        self.unreached = self._start_all(lost, self._start, show_message)
        if self.unreached and have_connected:  # the scheduler took these hosts away meanwhile
            job, _ = self._request_hosts(list(self.unreached), show_message)
            self.unreached = self._each(list(self.unreached), self._start)
        reached = len(self._hosts) - len(self.unreached)
        failed = "; ".join(f"{key}: {reason}" for key, reason in self.unreached.items())
        words = f"{reached} of {len(self._hosts)}" + (f", {job}" if job else "")
        if self._environments is not None and lost:
            words += f", {self._environments.outcome()}"
        return words + (f" ({failed})" if failed else "")

    def _request_hosts(
        self, keys: Sequence[str], show_message: Callable[[str], None]
    ) -> tuple[str, bool]:
        """Request hosts with `RendezvousClient.request_hosts`, if the cluster has a scheduler."""
        if self._rendezvous is None or not keys:
            return "", False
        return self._rendezvous.request_hosts([self._place(key) for key in keys], show_message)

    def will_be_requeued(self, keys: Collection[str]) -> bool:
        """Return True if a scheduler replaces these hosts, for example after a preemption.

        If so, wait until the hosts are gone.
        """
        if self._rendezvous is None:
            return False
        if not self._rendezvous.will_be_requeued([self._place(key) for key in keys]):
            return False
        return repeat_until(lambda: set(keys) <= set(self.lost()), 4 * LOST_S)

    def _place(self, key: str) -> int:
        """Return the place of a scheduler's host. The name of its placeholder ends with it."""
        return int(key.rpartition("-")[2])

    def _start(self, key: str) -> None:
        host, link, folder = self._hosts[key], self._link(key), self.home.folder
        start_request = ForkServerRequest(
            name=f"nbdist-{folder.name}-{link.name}-{time.time_ns() % 10**9}",
            modules=_modules(self._request),
            env=environment.shared(self._request) | host.env,
            work=host.folder or str(folder.cwd()),
            must_work_there=bool(host.folder),
            grace_s=self._settings.return_grace_s,
        )
        if key in self._remote:
            self._remote.pop(key).close()
        link.close()  # a former process may have left a connection
        with contextlib.ExitStack() as undo:
            fork_server = RemoteForkServer.start(link, start_request, self.home)
            undo.callback(fork_server.close)
            if self._controller:
                fork_server.forward_controller(self._controller)
            fork_server.forward(sorted(self._open_ports))
            undo.pop_all()
        self._remote[key] = fork_server

    def _start_all(
        self, keys: Sequence[str], work: Callable[[str], None], show_message: Callable[[str], None]
    ) -> dict[str, str]:
        """Start fork servers in parallel, with the progress of installations.

        Returns:
            The error messages by key.
        """
        environments = self._environments
        if environments is None or not keys:
            return self._each(keys, work)
        environments.prepare(show_message)
        with ThreadPoolExecutor(1, "nbdist-install") as pool:
            started = pool.submit(self._each, keys, work)
            try:
                while not repeat_until(started.done, _PROGRESS_S):
                    if progress := environments.progress():
                        show_message(progress)
            except BaseException:  # an interrupt: hosts that still install stop at once
                environments.cancel()
                raise
            return started.result()

    def _link(self, key: str) -> HostConnection:
        """Create a connection to a host without opening it. A successor uses the same name."""
        host = self._hosts[key]
        if self._rendezvous is not None:
            return self._rendezvous.link(host, self._place(key))
        name = f"h{zlib.crc32(key.encode()):08x}"
        return SshConnection(
            host, self.home.folder, name, self._settings.ssh_config, self._environments
        )

    def _each(self, keys: Iterable[str], work: Callable[[str], None]) -> dict[str, str]:
        """Call `work` for all keys in parallel, and return the error messages by key."""

        def attempt(key: str) -> str:
            try:
                work(key)
            except OwnedError:
                raise
            except (NbdistError, OSError) as error:
                return str(error)
            return ""

        keys = list(keys)
        with ThreadPoolExecutor(_MAX_PARALLEL, "nbdist-reach") as pool:
            outcomes = zip(keys, pool.map(attempt, keys), strict=True)
            return {key: error_text for key, error_text in outcomes if error_text}

    @property
    def open_ports(self) -> tuple[int, ...]:
        """Ports of this machine, besides the controller's, that are forwarded to other hosts."""
        return tuple(sorted(self._open_ports))

    @property
    def locations(self) -> dict[str, ForkServerLocation]:
        """The locations of the fork servers on other hosts, by host key."""
        return {key: fork_server.location for key, fork_server in self._remote.items()}

    def await_imports(self, timeout_s: float) -> dict[str, dict[str, str]]:
        """Wait until all fork servers have imported their modules.

        Returns:
            The versions of the modules, by the keys of the hosts that have engines.

        Raises:
            StartError: a fork server failed to import a module, or has ended.
        """
        found: dict[str, dict[str, str]] = {}
        for key, fork_server in self._fork_servers().items():
            if self._runs(key) or key == HOME:
                try:
                    found[key] = fork_server.await_ready(timeout_s)
                except StartError as error:
                    raise StartError(f"{key}: {error}" if key else str(error)) from None
        if not any(not host.name for host in self._request.hosts):
            del found[HOME]  # no engines run here
        return found

    # Addresses as the engines of a host see them.

    def forward_controller(self, controller: Path) -> None:
        """Make ipyparallel's controller reachable from all hosts.

        Args:
            controller: the path of its connection file for engines.
        """
        self._controller = json.loads(controller.read_text())
        self._for_all_remote(lambda fork_server: fork_server.forward_controller(self._controller))

    def add_open_ports(self, ports: Sequence[int]) -> None:
        """Forward these ports of this machine to all hosts."""
        self._open_ports.update(ports)
        self._for_all_remote(lambda fork_server: fork_server.forward(ports))

    @contextlib.contextmanager
    def payload_listener(self) -> Iterator[PayloadListener]:
        """Provide the listener to which ranks connect for large objects.

        It stays for later objects if its port is forwarded to other hosts.
        """
        if not self._remote:
            with contextlib.closing(PayloadListener()) as listener:
                yield listener
            return
        if self._payloads is None:
            self._payloads = PayloadListener()
            self.add_open_ports([self._payloads.port])
        yield self._payloads

    def _close_payloads(self) -> None:
        if self._payloads is not None:
            self._payloads.close()

    def _for_all_remote(self, work: Callable[[RemoteForkServer], None]) -> None:
        there = [key for key in self._remote if self._runs(key)]
        for key, reason in self._each(there, lambda key: work(self._remote[key])).items():
            if self._runs(key):  # else the host was lost meanwhile
                raise StartError(reason)

    def folder(self, host: str) -> str:
        """Return the path of the cluster's folder on a host."""
        return self._remote[host].location.folder if host else str(self.home.folder)

    def env(self, host: str) -> dict[str, str]:
        """Return the environment variables of engines that are specific to a host."""
        return self._remote[host].env() if host else _env_here(self._request)

    def bound_socket(self, host: str, bound_socket: BoundSocket) -> SocketAddress:
        """Return the ZeroMQ address of a socket of this machine, as seen from a host."""
        if host == HOME:
            return bound_socket.address
        url = f"ipc://{self._remote[host].prefix()}:{bound_socket.port}"
        return SocketAddress(url=url, server_key=bound_socket.public_key)

    def service(self, host: str, port: int) -> str:
        """Return the gRPC address of a port of this machine, as seen from a host."""
        return f"unix:{self._remote[host].prefix()}:{port}" if host else f"{LOOPBACK}:{port}"

    def address(self, host: str) -> str:
        """Return the address of a host to which engines of other hosts connect."""
        if host:
            return self._hosts[host].address or self._remote[host].location.address or host
        given = [h.address for h in self._request.hosts if not h.name and h.address]
        seen = [fork_server.location.from_address for fork_server in self._remote.values()]
        return next(filter(None, (*given, *seen)), LOOPBACK)

    def connection(self, host: str) -> str:
        """Describe the connection from this machine to a host, with its round-trip time."""
        if host == HOME:
            return "this machine"
        by = "ssh" if self._rendezvous is None else self._rendezvous.job(self._place(host))
        began = time.perf_counter()
        answered = bool(self._runs(host) and self._remote[host].poll())
        round_ms = 1000 * (time.perf_counter() - began)
        return f"{by}, responds in {round_ms:.1f} ms" if answered else "cannot be reached"

    def cores(self, host: str) -> tuple[int, ...]:
        """Return the CPU cores of a host that engines may use; empty if unknown."""
        return self._fork_servers()[host].state.cores if host in self._fork_servers() else ()

    def gpus(self, host: str) -> tuple[str, ...]:
        """Return the NVIDIA GPUs of a host; empty if unknown."""
        return self._fork_servers()[host].state.gpus if host in self._fork_servers() else ()

    # Owners.

    def leave(self) -> None:
        """Close the connections only: the fork servers wait for another owner."""
        self._close_payloads()
        for fork_server in self._remote.values():
            fork_server.leave()
        self.home.leave()

    def detach(self, *, on: bool) -> None:
        """Set whether engines outlive this process."""
        for key, fork_server in self._remote.items():
            if key not in self.disconnected_hosts():
                fork_server.detach(on=on)
        self.home.detach(on=on)

    def close(self) -> None:
        """End all fork servers and their children. Safe to call more than once.

        This starts no threads, because Python cannot start any during its exit.
        """
        self._close_payloads()
        with contextlib.ExitStack() as steps:
            if self._rendezvous is not None:
                steps.callback(self._rendezvous.close)
            steps.callback(self.home.close)
            for fork_server in self._remote.values():
                steps.callback(fork_server.close)
                fork_server.announce_end()


def _modules(request: ClusterRequest) -> tuple[str, ...]:
    """Return the modules that a fork server imports for the frameworks of a request."""
    frameworks = request.frameworks
    if len(frameworks) == len(_STEPS):
        return _ALONE, *frameworks, *PRELOADED, _MIRRORED, *_STEPS["jax"], _KERAS_NEEDS
    steps = (name for framework in frameworks for name in _STEPS[framework])
    return *frameworks, *(_KERAS if "tensorflow" in frameworks else ()), *PRELOADED, *steps


def _others(request: ClusterRequest) -> dict[str, Host]:
    """Return the hosts other than this machine, by key."""
    return {host.key: host for host in request.hosts if host.name}


def _env_here(request: ClusterRequest) -> dict[str, str]:
    """Return the environment variables that the inventory sets for this machine."""
    return next((host.env for host in request.hosts if not host.name), {})
