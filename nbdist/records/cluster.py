"""Requests for clusters, and their hosts, sockets and workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nbdist.records.base import (
    MOST_SEED,
    STRATEGY_OF,
    Communication,
    Framework,
    Record,
    ResultRow,
    StrategyName,
)
from nbdist.records.options import Option
from nbdist.records.own_modules import Sync
from nbdist.records.scheduler import Batch
from nbdist.records.topology import Bench


class TpuPlace(Record, frozen=True):
    """The place of a host in slices of TPUs.

    Attributes:
        accelerator: accelerator type of a slice, such as `v5litepod-16`; empty if unknown.
        topology: shape of a slice in chips, such as `4x4`; empty if unknown.
        slice_index: number of the slice of this host.
        slices: number of slices.
        worker: number of this host in its slice.
        workers: number of hosts of a slice.
    """

    accelerator: str
    topology: str
    slice_index: int
    slices: int
    worker: int
    workers: int


class Host(Record, frozen=True):
    """A host and its settings.

    Attributes:
        name: host name for `ssh`; empty for this machine.
        user: login name; empty for ssh's default.
        port: port of sshd; 0 for ssh's default.
        devices: GPUs of the engine, or virtual CPU devices under JAX; 0 uses the
            `devices_per_host` of the cluster.
        python: interpreter on the host; empty for the path of this machine's.
        folder: working directory; empty for that of this process, if it exists there.
        address: address for collectives; empty for the one that `ssh` uses.
        env: extra environment variables.
        tpu: place in slices of TPUs. `tpu` in place of hosts sets it; None without.
    """

    name: str = ""
    user: str = ""
    port: int = 0
    devices: int = 0
    python: str = ""
    folder: str = ""
    address: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    tpu: TpuPlace | None = None

    @property
    def key(self) -> str:
        """Unique name of the host; empty for this machine."""
        if not self.name:
            return ""
        user, port = (f"{self.user}@" if self.user else ""), (f":{self.port}" if self.port else "")
        return f"{user}{self.name}{port}"


class ClusterRequest(Record, frozen=True):
    """The request for a cluster.

    Attributes:
        hosts: one for each engine.
        frameworks: frameworks that the engines load.
        batch: the scheduler that allocates the hosts; None if the hosts are named.
        sync: the user's own modules that nbdist sends; None to send none.
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
    install: Annotated[
        bool,
        Option(
            help="Install the notebook's packages on hosts over ssh, in a folder of their own.",
            details="See [environments](clusters.md#environments).",
        ),
    ] = False
    batch: Batch | None = None
    sync: Sync | None = Sync()
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
        """True if all engines are on this machine."""
        return not any(host.name for host in self.hosts)

    @property
    def tpu(self) -> TpuPlace | None:
        """Place of the first host that belongs to a TPU slice; None without TPUs."""
        return next((host.tpu for host in self.hosts if host.tpu), None)


def strategies_of(request: ClusterRequest) -> tuple[StrategyName, ...]:
    """Return the strategy of each framework that the workers run."""
    return tuple(STRATEGY_OF[framework] for framework in request.frameworks)


class Phase(Record, frozen=True):
    """A phase of a start. `seconds` is its duration."""

    name: str
    seconds: float
    detail: str = ""


class SocketAddress(Record, frozen=True):
    """Address of a notebook socket for engines. `server_key` is its CURVE key (Z85)."""

    url: str
    server_key: bytes


class BoundSocket(Record, frozen=True):
    """A socket of the notebook that another process can bind again; engines reconnect.

    Attributes:
        port: port on the loopback interface.
        public_key: CURVE public key (Z85).
        secret_key: CURVE secret key (Z85).
    """

    port: int
    public_key: bytes
    secret_key: bytes

    @property
    def address(self) -> SocketAddress:
        """Address for processes on this machine."""
        return SocketAddress(url=f"tcp://127.0.0.1:{self.port}", server_key=self.public_key)


class WorkerIdentity(Record, frozen=True):
    """A rank, the sockets for its events and its cells, and the seed of its generators.

    Attributes:
        telemetry: True if the rank reports its steps and times its collectives.
        address: address of this rank for other ranks on hosts with GPUs; else empty.
    """

    rank: int
    world_size: int
    stream: SocketAddress
    dispatch: SocketAddress
    seed: int = 0
    telemetry: bool = True
    address: str = ""


class ForkServerRequest(Record, frozen=True):
    """A request to start a fork server.

    Attributes:
        name: name of its folder, which must not exist.
        modules: modules to import before a fork.
        env: variables added to the environment of the connection.
        work: working directory.
        must_work_there: fail if `work` does not exist. If False, use the home directory.
        grace_s: seconds to wait for a new owner.
    """

    name: str
    modules: tuple[str, ...]
    env: dict[str, str]
    work: str
    must_work_there: bool
    grace_s: float


class ForkServerLocation(Record, frozen=True):
    """Process, folder and addresses of a fork server.

    Attributes:
        pid: process id.
        folder: its folder, open to this user only.
        address: address of its host in the ssh connection; empty if unknown.
        from_address: address of the ssh client; empty if unknown.
    """

    pid: int
    folder: str
    address: str
    from_address: str


class EngineLedger(Record, frozen=True):
    """Engines of a cluster, as its owner knows them.

    Attributes:
        names: name of each rank's engine at the fork server.
        ids: ipyparallel's id of each engine, by rank, and of each spare, by place.
        previous_ids: ids of engines that ended.
        spares: name of each spare at the fork server, by place.
        spares_made: spares started so far.
        places: index of each rank's host in the request.
        locations: fork servers of other hosts, by host key.
        open_ports: ports of this machine that remote engines use, without the controller's.
    """

    names: dict[int, str] = msgspec.field(default_factory=dict)
    ids: dict[int, int] = msgspec.field(default_factory=dict)
    previous_ids: tuple[int, ...] = ()
    spares: dict[int, str] = msgspec.field(default_factory=dict)
    spares_made: int = 0
    places: tuple[int, ...] = ()
    locations: dict[str, ForkServerLocation] = msgspec.field(default_factory=dict)
    open_ports: tuple[int, ...] = ()


class WorkerHello(Record, frozen=True):
    """First answer of an engine."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]


class Device(Record, frozen=True):
    """A device of a rank, with the framework's name for it."""

    platform: str
    kind: str
    name: str
    memory_bytes: int | None = None


class WorkerState(ResultRow, frozen=True):
    """A rank in `%dist_status`."""

    rank: int
    host: str
    pid: int
    versions: dict[str, str]
    devices: tuple[Device, ...]
    state: str = "idle"
    memory_bytes: int = 0

    @property
    def where(self) -> str:
        """Label of output: `rank@host`."""
        return f"{self.rank}@{self.host}"


class MirroredWiring(Record, frozen=True):
    """Input of one rank for MultiWorkerMirroredStrategy."""

    tf_config: str
    communication: Communication


class PjrtWiring(Record, frozen=True):
    """Input of one rank for `jax.distributed.initialize`.

    Attributes:
        service: gRPC address of the coordination service. No rank hosts it.
        address: address of this rank for other ranks.
        cpu_devices: virtual CPU devices of this rank; 0 for JAX's default.
        compiled: folder of the compilation cache, created on demand; empty for none.
        bench: measurements of these devices; None if not measured.
    """

    service: str
    address: str
    rank: int
    world_size: int
    cpu_devices: int
    compiled: str
    bench: Bench | None = None
