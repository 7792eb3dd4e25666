"""Options of `%dist_start`, `%dist_resize` and `%dist_doctor`, and the hosts in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from nbdist.cluster import inventory, resources, tpu_slices
from nbdist.errors import UsageError
from nbdist.magics import framework_detection
from nbdist.records import Batch, ClusterRequest, Option, ProgramLauncher, options_of
from nbdist.session.cluster import Cluster

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection

    from nbdist.records import Host, ProgramLaunch
    from nbdist.views.cluster.hosts import DoctorPicture

_SCHEDULER = options_of(Batch)
_CLUSTER = {name: o for name, o in options_of(ClusterRequest).items() if name not in _SCHEDULER}
_KIND = _SCHEDULER.pop("kind")  # only for exported programs
_HOSTS = (
    Option(
        flags=("host",),
        nargs="*",
        metavar="HOST",
        help="Number of hosts, as in `4 hosts` or `4`, ssh names, as in gpu1 gpu2:8, or tpu.",
        details="`gpu2:8` gives 8 devices, and `me@gpu3:2222` is a user and a port. `tpu` is the "
        "hosts of this machine's [TPU slice](clusters.md#tpu-slices). See [clusters](clusters.md).",
        words=(tpu_slices.NAME,),
    ),
    Option(flags=("-n", "--number"), kind="number", metavar="N", help="Number of hosts."),
    Option(flags=("--hosts",), metavar="FILE", help="File that lists the hosts."),
    Option(flags=("--profile",), metavar="NAME", help="Name of your file of hosts."),
    _SCHEDULER["python"],
)
_FRAMEWORK = Option(
    flags=("-f", "--framework"),
    choices=resources.FRAMEWORK_CHOICES,
    default="frameworks that the cells of the notebook use, else all that are installed",
    help="Frameworks that the workers load.",
)
_NO_SYNC = Option(
    flags=("--no-sync",),
    kind="switch",
    help="Let workers import your own modules from their hosts' disks, as they are there.",
    details="By default, workers use the modules that the notebook sees. See "
    "[your own modules](clusters.md#your-own-modules).",
)
_GO_ON = Option(
    flags=("--go-on",),
    kind="switch",
    help="Continue the run that was stopped, from its newest checkpoint.",
)
STARTING = (
    *_HOSTS,
    *(option for option in _SCHEDULER.values() if option.name != "python"),
    _FRAMEWORK,
    *_CLUSTER.values(),
    _NO_SYNC,
)
LAUNCHING = (
    Option(
        flags=("--launcher",),
        choices=("local", "ssh", "slurm", "kubernetes", "mpi"),
        default="none",
        help="Launcher for which to write files that start the program.",
    ),
    *(_SCHEDULER[name] for name in ("partition", "time", "gpus_per_host", "submit", "image")),
    _KIND,
)
SUBMITTING = (
    LAUNCHING[0].but(
        choices=get_args(ProgramLauncher),
        default="local",
        help="Launcher that starts the program: `local` uses processes on this machine.",
    ),
    *(_SCHEDULER[name] for name in ("partition", "time", "gpus_per_host", "submit")),
)
RESIZING = (*_HOSTS, _GO_ON)
EXAMINING = (
    *_HOSTS,
    Option(
        flags=("--data",),
        metavar="PATTERN",
        help="Pattern of files that are the same on all hosts.",
    ),
    Option(flags=("--checkpoint",), metavar="DIR", help="Folder that all hosts share."),
    Option(
        flags=("--bench",),
        kind="switch",
        help="Measure the bandwidth between each two hosts, and name slow links.",
    ),
)


def _batch(args: Namespace) -> Batch | None:
    """Return the request to a scheduler; None without one.

    Raises:
        UsageError: options for a scheduler are given without `--launcher`.
    """
    own = [option for option in _SCHEDULER.values() if option.name not in ("launcher", "python")]
    given = {option: value for option in own if (value := getattr(args, option.name))}
    if args.launcher is not None:
        fields = {option.field: value for option, value in given.items()}
        fields |= {"options": tuple(args.submit), "python": args.python or ""}
        return Batch(launcher=args.launcher, **fields)
    if given:
        flags = ", ".join(option.flag for option in given)
        choices = ", ".join(_SCHEDULER["launcher"].choices)
        raise UsageError(f"{flags} without --launcher: choose one from {choices}")
    return None


def launch(args: Namespace) -> ProgramLaunch | None:
    """Return the launcher of an exported program; None without one.

    Raises:
        UsageError: options for a scheduler are given without one.
    """
    own = [option for option in LAUNCHING if option.name != "launcher"]
    given = {option: value for option in own if (value := getattr(args, option.name, None))}
    if args.launcher in (None, "ssh", "local"):
        if given:
            flags = ", ".join(option.flag for option in given)
            raise UsageError(f"without a scheduler, as in --launcher slurm, leave out {flags}")
        chosen: Literal["ssh", "local"] | None = args.launcher
        return chosen
    fields = {option.field: value for option, value in given.items()}
    return Batch(launcher=args.launcher, **{**fields, "options": tuple(args.submit)})


def _counted(args: Namespace) -> int:
    """Return the number of hosts that a scheduler provides.

    Raises:
        UsageError: the hosts have names, or no number is given.
    """
    count = inventory.count_of(args.host, args.number)
    if count is None or args.hosts or args.profile:
        raise UsageError(f"{args.launcher} chooses the hosts: use their number, as in 4 hosts")
    return count


def names_hosts(args: Namespace) -> bool:
    """Return True if the line names hosts, or their number."""
    return bool(args.host or args.number or args.hosts or args.profile)


def chosen(args: Namespace) -> tuple[Host, ...]:
    """Return the hosts that the options name.

    Raises:
        UsageError: the options name no hosts, or are invalid.
    """
    asked = args.host, args.number, args.hosts, args.profile, args.python
    return inventory.choose(*asked)


def examined(args: Namespace, modules: Collection[str] = ()) -> DoctorPicture:
    """Examine hosts without a cluster. nbdist starts workers without a framework, and ends them.

    Args:
        args: the parsed options.
        modules: modules whose packages should be those of this process.

    Raises:
        UsageError: the hosts are invalid.
        StartError: a host cannot be reached, or has no Python with nbdist.
    """
    with Cluster(hosts=chosen(args), framework=resources.NO_FRAMEWORK) as cluster:
        return cluster.examine(**examination(args), modules=modules)


def examination(args: Namespace) -> dict[str, Any]:
    """Return the files and the folder to examine, for `Cluster.examine`."""
    return {"data": args.data or "", "checkpoint": args.checkpoint or "", "bench": args.bench}


def resized(args: Namespace) -> int | tuple[Host, ...]:
    """Return the hosts, or the number of hosts, of `%dist_resize`.

    A number stays a number: it may count the named hosts of the cluster.

    Raises:
        UsageError: the options name no hosts, or are invalid.
    """
    hosts = chosen(args)
    counted = inventory.count_of(args.host, args.number) is not None
    return len(hosts) if counted and not (args.hosts or args.profile) else hosts


def started(args: Namespace) -> Cluster:
    """Start the cluster that the options describe. It raises the errors of `Cluster`."""
    batch = _batch(args)
    typed = {option.field: getattr(args, name) for name, option in _CLUSTER.items()}
    given = {name: value for name, value in typed.items() if value is not None}
    hosts = chosen(args) if batch is None else _counted(args)
    is_tpu = not isinstance(hosts, int) and any(host.tpu for host in hosts)
    return Cluster(
        hosts=hosts,
        batch=batch,
        framework=args.framework or (None if is_tpu else framework_detection.framework()),
        sync=False if args.no_sync else inventory.sync_of(args.hosts, args.profile),
        **{**given, "env": resources.parse_env(args.env)},
    )
