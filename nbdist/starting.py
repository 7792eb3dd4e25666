"""The options of `%dist_start`, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.cluster import hosts, inventory
from nbdist.session import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

_STARTING = (
    argument("hosts", nargs="*", help="How many, `4 hosts` or `4`, or their names: gpu1 gpu2:8."),
    argument("-n", "--number", type=int, help="The same as a number."),
    argument("--hosts", dest="inventory", metavar="FILE", help="Hosts as this file lists them."),
    argument("--profile", metavar="NAME", help="The same, by the name of your file of hosts."),
    argument("--python", metavar="PATH", help="Python on other hosts; the path of this one's."),
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
        choices=hosts.FRAMEWORK_CHOICES,
        help="What the workers load; all that is installed if left out.",
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
        choices=hosts.COMMUNICATION_CHOICES,
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
        "--env", action="append", default=[], metavar="K=V", help="A variable of the workers."
    ),
)


def starting_arguments(function: Callable[..., Any]) -> Any:
    """Give a magic the options of `%dist_start`."""
    for option in reversed(_STARTING):
        function = option(function)
    return function


def started(args: Any) -> Cluster:
    """The cluster that was asked for; see `Cluster` for what it raises."""
    asked = args.hosts, args.number, args.inventory, args.profile, args.python
    return Cluster(
        hosts=inventory.choose(*asked),
        framework=args.framework,
        devices_per_host=args.devices_per_host,
        cpus_per_worker=args.cpus_per_worker,
        env=hosts.parse_env(args.env),
        communication=args.communication,
        spares=args.spares,
        min_hosts=args.min_hosts,
    )
