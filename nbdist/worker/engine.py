"""An ipyparallel engine, as it starts in a forked child of the seed."""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

from ipyparallel.engine.app import IPEngine

from nbdist.worker import ipykernel_patch

if TYPE_CHECKING:
    from collections.abc import Callable

ipykernel_patch.import_without_debugger()  # before the seed forks


def main(args: dict[str, Any], announce: Callable[[dict[str, Any]], None]) -> None:
    """Run an engine until it is told to stop.

    Args:
        args: `argv` for ipyparallel's own engine application; `cpus`, the cores to stay on.
        announce: unused; every target of the seed takes it.
    """
    del announce
    faulthandler.enable()
    if args["cpus"]:
        os.sched_setaffinity(0, args["cpus"])
    ipykernel_patch.apply()
    IPEngine.launch_instance(argv=args["argv"])
