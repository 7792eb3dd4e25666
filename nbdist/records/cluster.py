"""How a cluster is made, and what it is made of."""

from __future__ import annotations

import msgspec

from nbdist.records.base import Communication, Framework, Record
from nbdist.records.topology import Bench


class ClusterRequest(Record, frozen=True):
    """A local cluster as asked for.

    Attributes:
        hosts: number of engines, one for each host.
        frameworks: what the engines load.
        devices_per_host: virtual CPU devices under JAX, or GPUs given to each engine;
            0 leaves it to what is there.
        cpus_per_worker: cores that each engine may use; 0 is no limit.
        env: further environment of every engine.
        communication: how TensorFlow's collectives are made.
        spares: engines beside those, which take the place of one that is lost.
    """

    hosts: int
    frameworks: tuple[Framework, ...]
    devices_per_host: int = 0
    cpus_per_worker: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    communication: Communication = "auto"
    spares: int = 0


class Phase(Record, frozen=True):
    """One phase of a start, done after `seconds`."""

    name: str
    seconds: float
    detail: str = ""


class SocketAddress(Record, frozen=True):
    """A socket of the notebook's that engines connect to; `server_key` is its CURVE key (Z85)."""

    url: str
    server_key: bytes


class Door(Record, frozen=True):
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
        """What engines are told of it."""
        return SocketAddress(url=f"tcp://127.0.0.1:{self.port}", server_key=self.public_key)


class WorkerIdentity(Record, frozen=True):
    """A rank as it is told who it is, where it speaks to and where its cells come from."""

    rank: int
    world_size: int
    stream: SocketAddress
    dispatch: SocketAddress


class EngineBooks(Record, frozen=True):
    """What the owner of a cluster knows of its engines.

    Attributes:
        names: how the seed calls the engine of each rank.
        ids: what ipyparallel calls it; of a spare, by the place that it says it has.
        former_ids: of engines that are gone.
        spares: how the seed calls each spare, by its place.
        spares_made: how many there have been.
        places: of the ranks, among those that were asked for.
    """

    names: dict[int, str] = msgspec.field(default_factory=dict)
    ids: dict[int, int] = msgspec.field(default_factory=dict)
    former_ids: tuple[int, ...] = ()
    spares: dict[int, str] = msgspec.field(default_factory=dict)
    spares_made: int = 0
    places: tuple[int, ...] = ()


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
        address: host:port of the coordination service, which no rank hosts.
        cpu_devices: virtual CPU devices of this rank; 0 leaves it to JAX.
        compiled: the folder for what was compiled; it need not be there.
        bench: what was measured of these devices; None where nothing was.
    """

    address: str
    rank: int
    world_size: int
    cpu_devices: int
    compiled: str
    bench: Bench | None = None
