"""How a cluster is made, and what it is made of."""

from __future__ import annotations

import msgspec

from nbdist.records.base import STRATEGY_OF, Communication, Framework, Record, StrategyName
from nbdist.records.scheduler import Batch
from nbdist.records.topology import Bench


class Host(Record, frozen=True):
    """A host as its user names it, and what is particular to it.

    Attributes:
        name: as `ssh` finds it; empty for this machine.
        user: left to `ssh` where it is empty.
        port: of its sshd; left to `ssh` where it is 0.
        devices: GPUs that the engine uses, or virtual CPU devices under JAX; 0 for all there are.
        python: the program; empty for the one at the same path as here.
        folder: where the engine works; empty for the same one as here, if there is one.
        address: to which other hosts connect for collectives; empty for the one where `ssh` found
            it.
        env: further environment.
    """

    name: str = ""
    user: str = ""
    port: int = 0
    devices: int = 0
    python: str = ""
    folder: str = ""
    address: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Names it among others; empty for this machine."""
        if not self.name:
            return ""
        user, port = (f"{self.user}@" if self.user else ""), (f":{self.port}" if self.port else "")
        return f"{user}{self.name}{port}"


class ClusterRequest(Record, frozen=True):
    """A cluster as asked for.

    Attributes:
        hosts: where each engine is to be.
        frameworks: what the engines load.
        devices_per_host: virtual CPU devices under JAX, or GPUs given to each engine;
            0 leaves it to what is there.
        cpus_per_worker: cores that each engine may use; 0 is no limit.
        env: further environment of every engine.
        communication: how TensorFlow's collectives are made.
        spares: engines beside those, which take the place of one that is lost.
        min_hosts: with so many it starts, where others cannot be reached; 0 for all of them.
        batch: who gives the hosts, which have no names of their own; None where they are named.
        seed: of the random generators of every rank.
    """

    hosts: tuple[Host, ...]
    frameworks: tuple[Framework, ...]
    devices_per_host: int = 0
    cpus_per_worker: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    communication: Communication = "auto"
    spares: int = 0
    min_hosts: int = 0
    batch: Batch | None = None
    seed: int = 0

    @property
    def is_local(self) -> bool:
        """Whether all engines are on this machine."""
        return not any(host.name for host in self.hosts)


def strategies_of(request: ClusterRequest) -> tuple[StrategyName, ...]:
    """Return the strategy of each framework that the workers run."""
    return tuple(STRATEGY_OF[framework] for framework in request.frameworks)


class Phase(Record, frozen=True):
    """One phase of a start, done after `seconds`."""

    name: str
    seconds: float
    detail: str = ""


class SocketAddress(Record, frozen=True):
    """A socket of the notebook's that engines connect to; `server_key` is its CURVE key (Z85)."""

    url: str
    server_key: bytes


class BoundSocket(Record, frozen=True):
    """A socket of the notebook's that can be opened again: engines come back to it.

    Attributes:
        port: on the loopback interface.
        public_key: its CURVE key (Z85).
        secret_key: likewise.
    """

    port: int
    public_key: bytes
    secret_key: bytes

    @property
    def address(self) -> SocketAddress:
        """What processes on this machine are told of it."""
        return SocketAddress(url=f"tcp://127.0.0.1:{self.port}", server_key=self.public_key)


class WorkerIdentity(Record, frozen=True):
    """A rank: where it reports to, where its cells come from, the seed of its generators."""

    rank: int
    world_size: int
    stream: SocketAddress
    dispatch: SocketAddress
    seed: int = 0


class ForkServerRequest(Record, frozen=True):
    """What a seed is to be like.

    Attributes:
        name: of its folder, which must not be there yet.
        modules: what it imports before it forks.
        env: environment added to that of the connection.
        work: the folder it works in.
        must_work_there: else, where there is none, it is the user's own.
        grace_s: how long it waits for another owner.
    """

    name: str
    modules: tuple[str, ...]
    env: dict[str, str]
    work: str
    must_work_there: bool
    grace_s: float


class ForkServerLocation(Record, frozen=True):
    """Where a seed is.

    Attributes:
        pid: its own.
        folder: likewise, open to this user only.
        address: of this host, to which ssh connected; empty where it does not say.
        from_address: from which it did.
    """

    pid: int
    folder: str
    address: str
    from_address: str


class EngineLedger(Record, frozen=True):
    """What the owner of a cluster knows of its engines.

    Attributes:
        names: how the seed calls the engine of each rank.
        ids: what ipyparallel calls it; of a spare, by the place that it says it has.
        former_ids: of engines that are gone.
        spares: how the seed calls each spare, by its place.
        spares_made: how many there have been.
        places: of the ranks, among those that were asked for.
        locations: of the fork servers of other hosts, by host.
        open_ports: ports of this machine, other than the controller's, that engines there use.
    """

    names: dict[int, str] = msgspec.field(default_factory=dict)
    ids: dict[int, int] = msgspec.field(default_factory=dict)
    former_ids: tuple[int, ...] = ()
    spares: dict[int, str] = msgspec.field(default_factory=dict)
    spares_made: int = 0
    places: tuple[int, ...] = ()
    locations: dict[str, ForkServerLocation] = msgspec.field(default_factory=dict)
    open_ports: tuple[int, ...] = ()


class WorkerHello(Record, frozen=True):
    """The first answer of an engine."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]


class Device(Record, frozen=True):
    """A device that a rank drives, as its framework names it."""

    platform: str
    kind: str
    name: str
    memory_bytes: int | None = None


class WorkerState(Record, frozen=True):
    """A rank, as `%dist_status` shows it."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]
    devices: tuple[Device, ...]
    state: str = "idle"
    memory_bytes: int = 0

    @property
    def where(self) -> str:
        """`rank@host`, as it labels output."""
        return f"{self.rank}@{self.host}"


class MirroredWiring(Record, frozen=True):
    """What one rank needs to build MultiWorkerMirroredStrategy."""

    tf_config: str
    communication: Communication


class PjrtWiring(Record, frozen=True):
    """What one rank needs to join the JAX processes.

    Attributes:
        service: the coordination service, which no rank hosts, as gRPC names it.
        address: this rank's own, to which others connect.
        cpu_devices: virtual CPU devices of this rank; 0 leaves it to JAX.
        compiled: the folder for what was compiled; it need not be there.
        bench: what was measured of these devices; None where nothing was.
    """

    service: str
    address: str
    rank: int
    world_size: int
    cpu_devices: int
    compiled: str
    bench: Bench | None = None
