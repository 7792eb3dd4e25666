"""Detached runner, which follows a run without a notebook.

Run `python -m nbdist.session.detached FOLDER`; the fork server does so after the cluster's owner
has ended. The runner stores the run, cancels hangs, and keeps the cluster for a while after the
end of the run. It hands the cluster over to a notebook that requests it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from nbdist.errors import LeftError, NbdistError, OwnedError
from nbdist.session.cluster import Cluster
from nbdist.settings import Settings

_log = logging.getLogger(__name__)
_POLL_S = 0.1


def keep(cluster: Cluster, idle_s: float) -> None:
    """Follow the running cell. Stop the cluster `idle_s` seconds after the end of the cell."""
    try:
        cluster.follow()
    except LeftError:
        return
    except NbdistError as error:  # the run's directory also contains it
        _log.warning("the cell ended: %s", error)
    except KeyboardInterrupt:  # Stop in a browser ends the cell so
        _log.info("the cell was stopped")
    deadline = time.monotonic() + idle_s
    while cluster.inspection.is_whole and time.monotonic() < deadline:
        if cluster.inspection.is_requested:
            cluster.leave()
            return
        time.sleep(_POLL_S)
    cluster.stop()


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    settings = Settings.from_environment()
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = nowhere  # the cell's output is stored with the run
        try:
            cluster = Cluster.adopt(Path(sys.argv[1]), settings, detached_runner=True)
        except OwnedError:
            return  # a notebook has taken over the cluster
        _log.info("following the cell")
        keep(cluster, settings.keep_idle_s)
        sys.stdout = sys.__stdout__


if __name__ == "__main__":
    main()
