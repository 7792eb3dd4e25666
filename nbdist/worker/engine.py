"""An ipyparallel engine, started in a forked child of the fork server."""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

from ipyparallel.engine.app import IPEngine

from nbdist.utils import host_topology
from nbdist.worker import ipykernel_patch

if TYPE_CHECKING:
    from collections.abc import Callable

ipykernel_patch.import_without_debugger()  # before the fork server forks


def main(args: dict[str, Any], announce: Callable[[dict[str, Any]], None]) -> None:
    """Run an engine until the controller stops it.

    Args:
        args: `argv` for ipyparallel's engine application; `cpus`, the cores to run on.
        announce: unused; the fork server passes it to every target.
    """
    del announce
    faulthandler.enable()
    if args["cpus"]:
        os.sched_setaffinity(0, args["cpus"])
    else:
        host_topology.bind_to_gpus()
    ipykernel_patch.apply()
    IPEngine.launch_instance(argv=args["argv"])
