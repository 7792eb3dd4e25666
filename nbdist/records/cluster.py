"""How a cluster is made, and what it is made of."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nbdist.records.base import (
    MOST_SEED,
    STRATEGY_OF,
    Communication,
    Framework,
    Record,
    StrategyName,
)
from nbdist.records.options import Option
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
        batch: who gives the hosts, which have no names of their own; None where they are named.
    """

    hosts: tuple[Host, ...]
    frameworks: tuple[Framework, ...]
    devices_per_host: Annotated[
        int,
        Option(
            metavar="K",
            least=0,
            default="all GPUs of the host, else one CPU device",
            help="Visible GPUs of each worker, or virtual CPU devices (JAX) without GPUs.",
        ),
    ] = 0
    cpus_per_worker: Annotated[
        int,
        Option(
            metavar="K",
            least=0,
            default="no limit",
            help="Cores that each worker is bound to.",
        ),
    ] = 0
    env: Annotated[
        dict[str, str],
        Option(
            kind="list",
            metavar="K=V",
            help="Environment variable of the workers.",
            details="Can be repeated.",
        ),
    ] = msgspec.field(default_factory=dict)
    communication: Annotated[
        Communication,
        Option(
            help="Collectives of TensorFlow; auto is NCCL between GPUs, else ring.",
        ),
    ] = "auto"
    spares: Annotated[
        int,
        Option(
            metavar="K",
            least=0,
            default="none",
            help="Waiting workers that replace lost ones under pjrt.",
            details="Under mirrored, new workers are forked.",
        ),
    ] = 0
    min_hosts: Annotated[
        int,
        Option(
            metavar="K",
            least=0,
            default="all hosts",
            help="Start with as few as K hosts if others cannot be reached.",
        ),
    ] = 0
    batch: Batch | None = None
    seed: Annotated[
        int,
        Option(
            metavar="N",
            least=0,
            most=MOST_SEED,
            default="random",
            help="Seed of the random generators of all workers.",
            details="The generators are those of Python, NumPy, TensorFlow and Keras. "
            "`%dist_status` shows the seed.",
        ),
    ] = 0

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
        """What processes on this machine are told of it."""
        return SocketAddress(url=f"tcp://127.0.0.1:{self.port}", server_key=self.public_key)


class WorkerIdentity(Record, frozen=True):
    """A rank: where it reports to, where its cells come from, the seed of its generators."""

    rank: int
    world_size: int
    stream: SocketAddress
    dispatch: SocketAddress
    seed: int = 0


class Sowing(Record, frozen=True):
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


class Sown(Record, frozen=True):
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


class EngineBooks(Record, frozen=True):
    """What the owner of a cluster knows of its engines.

    Attributes:
        names: how the seed calls the engine of each rank.
        ids: what ipyparallel calls it; of a spare, by the place that it says it has.
        former_ids: of engines that are gone.
        spares: how the seed calls each spare, by its place.
        spares_made: how many there have been.
        places: of the ranks, among those that were asked for.
        sown: where the seed of each other host is, by the key of that.
        doors: ports of this machine, beside the controller's, that engines there reach.
    """

    names: dict[int, str] = msgspec.field(default_factory=dict)
    ids: dict[int, int] = msgspec.field(default_factory=dict)
    former_ids: tuple[int, ...] = ()
    spares: dict[int, str] = msgspec.field(default_factory=dict)
    spares_made: int = 0
    places: tuple[int, ...] = ()
    sown: dict[str, Sown] = msgspec.field(default_factory=dict)
    doors: tuple[int, ...] = ()


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
