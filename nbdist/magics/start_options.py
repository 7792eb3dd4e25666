"""The options of `%dist_start`, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.cluster import host_request, inventory, resources
from nbdist.errors import UsageError
from nbdist.magics import framework_detection
from nbdist.magics.options import unquoted
from nbdist.records import Batch
from nbdist.session.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Host
    from nbdist.views.cluster.hosts import DoctorPicture

_OPTION_OF = {"queue": "--partition", "gpus": "--gpus-per-host", "options": "--sbatch"}
_HOSTS = (
    argument("hosts", nargs="*", help="How many, `4 hosts` or `4`, or their names: gpu1 gpu2:8."),
    argument("-n", "--number", type=int, help="The same as a number."),
    argument("--hosts", dest="inventory", metavar="FILE", help="Hosts as this file lists them."),
    argument("--profile", metavar="NAME", help="The same, by the name of your file of hosts."),
    argument("--python", metavar="PATH", help="Python on other hosts; the path of this one's."),
)
_BATCH = (
    argument(
        "--launcher",
        choices=host_request.LAUNCHERS,
        help="Who gives the hosts, where they have no names yet.",
    ),
    argument("--partition", "--queue", dest="queue", default="", help="Of the scheduler."),
    argument("--time", default="", metavar="H:M:S", help="How long the hosts are needed."),
    argument(
        "--gpus-per-host", type=int, default=0, metavar="K", help="GPUs that each host is to have."
    ),
    argument(
        "--sbatch",
        "--submit",
        dest="submit",
        action="append",
        default=[],
        metavar="WORDS",
        help='Further words for the scheduler, as "--account=x".',
    ),
    argument(
        "--listen", default="", metavar="ADDRESS", help="Of this machine, to which hosts connect."
    ),
    argument("--image", default="", help="Of Kubernetes' containers."),
    argument("--namespace", default="", help="Kubernetes'; its configuration's if left out."),
    argument("--pod", default="", metavar="FILE", help="What Kubernetes' pods have beside."),
)
_RESIZING = (
    argument(
        "--go-on",
        action="store_true",
        help="The run that was stopped goes on there, from its newest checkpoint.",
    ),
)
EXAMINING = (
    *_HOSTS,
    argument("--data", default="", metavar="PATTERN", help="Files that all hosts have alike."),
    argument("--checkpoint", default="", metavar="DIR", help="A folder that all hosts share."),
)
_STARTING = (
    argument(
        "--min-hosts",
        type=int,
        default=0,
        metavar="K",
        help="Start with as few as K, where others cannot be reached.",
    ),
    argument(
        "-f",
        "--framework",
        choices=resources.FRAMEWORK_CHOICES,
        help="What the workers load; if left out, what the notebook's cells use, or all there is.",
    ),
    argument(
        "--devices-per-host",
        type=int,
        default=0,
        metavar="K",
        help="Visible GPUs of each worker, or virtual CPU devices (JAX) where there is no GPU.",
    ),
    argument(
        "--cpus-per-worker", type=int, default=0, metavar="K", help="Cores each worker stays on."
    ),
    argument(
        "--communication",
        choices=resources.COMMUNICATION_CHOICES,
        default="auto",
        help="TensorFlow's collectives: NCCL where there are GPUs, else rings, if left out.",
    ),
    argument(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="Workers that wait to take the place of one that is lost.",
    ),
    argument(
        "--seed",
        type=int,
        metavar="N",
        help="Seed of Python's, NumPy's, TensorFlow's and Keras's generators on all workers; if "
        "left out, drawn at random.",
    ),
    argument(
        "--env", action="append", default=[], metavar="K=V", help="A variable of the workers."
    ),
)


def starting_arguments(function: Callable[..., Any]) -> Any:
    """Give a magic the options of `%dist_start`."""
    return _with(function, *_HOSTS, *_BATCH, *_STARTING)


def examining_arguments(function: Callable[..., Any]) -> Any:
    """Give a magic the options of `%dist_doctor`."""
    return _with(function, *EXAMINING)


def resizing_arguments(function: Callable[..., Any]) -> Any:
    """Give a magic the options of `%dist_resize`."""
    return _with(function, *_HOSTS, *_RESIZING)


def _with(function: Callable[..., Any], *options: Callable[..., Any]) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def _batch(args: Any) -> Batch | None:
    """How a scheduler is asked; None where none is.

    Raises:
        UsageError: what only schedulers know was typed without one.
    """
    given = {
        "queue": unquoted(args.queue),
        "time": unquoted(args.time),
        "gpus": args.gpus_per_host,
        "options": tuple(map(unquoted, args.submit)),
        "listen": unquoted(args.listen),
        "image": unquoted(args.image),
        "namespace": unquoted(args.namespace),
        "pod": unquoted(args.pod),
    }
    if args.launcher is not None:
        python = unquoted(args.python or "")
        return Batch(launcher=args.launcher, python=python, **given)
    typed = [_OPTION_OF.get(name, f"--{name}") for name, value in given.items() if value]
    if typed:
        choices = ", ".join(host_request.LAUNCHERS)
        raise UsageError(f"{', '.join(typed)} without --launcher: choose one from {choices}")
    return None


def _counted(args: Any) -> int:
    """How many hosts a scheduler is to give.

    Raises:
        UsageError: they have names.
    """
    count = inventory.count_of(args.hosts, args.number)
    if count is None or args.inventory or args.profile:
        raise UsageError(f"{args.launcher} chooses the hosts: type how many, as in 4 hosts")
    return count


def names_hosts(args: Any) -> bool:
    """Whether any were typed."""
    return bool(args.hosts or args.number or args.inventory or args.profile)


def chosen(args: Any) -> tuple[Host, ...]:
    """The hosts that were typed.

    Raises:
        UsageError: nothing, or something else, was typed.
    """
    asked = args.hosts, args.number, args.inventory, args.profile, args.python
    return inventory.choose(*asked)


def examined(args: Any) -> DoctorPicture:
    """Look at hosts without a cluster: workers are started there, without a framework, and ended.

    Raises:
        UsageError: they are named wrongly.
        StartError: they cannot be reached, or have no Python with nbdist.
    """
    with Cluster(hosts=chosen(args), framework=resources.NO_FRAMEWORK) as cluster:
        return cluster.examine(data=args.data, checkpoint=args.checkpoint)


def resized(args: Any) -> int | tuple[Host, ...]:
    """The hosts that `%dist_resize` was given; a number stays one, for it may be of named ones.

    Raises:
        UsageError: nothing, or something else, was typed.
    """
    hosts = chosen(args)
    counted = args.number is not None or args.hosts[:1] == [str(len(hosts))]
    return len(hosts) if counted and not (args.inventory or args.profile) else hosts


def started(args: Any) -> Cluster:
    """The cluster that was asked for; see `Cluster` for what it raises."""
    batch = _batch(args)
    return Cluster(
        hosts=chosen(args) if batch is None else _counted(args),
        batch=batch,
        framework=args.framework or framework_detection.framework(),
        devices_per_host=args.devices_per_host,
        cpus_per_worker=args.cpus_per_worker,
        env=resources.parse_env(args.env),
        communication=args.communication,
        spares=args.spares,
        min_hosts=args.min_hosts,
        seed=args.seed,
    )
