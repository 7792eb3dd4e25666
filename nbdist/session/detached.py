"""Follows a detached run while no notebook is there: `python -m nbdist.session.detached FOLDER`.

The seed starts it when the cluster's owner is gone. What the run says goes on into its directory,
hangs are broken off, and when the run is over the cluster is kept for a while. A notebook that asks
for the cluster gets it at once.
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
    """Follow the cell under way, and keep the cluster for so many seconds after its end."""
    try:
        cluster.follow()
    except LeftError:
        return
    except NbdistError as error:  # the run's directory has it
        _log.warning("the cell ended: %s", error)
    except KeyboardInterrupt:  # as a Stop in a page ends it
        _log.info("the cell was stopped")
    deadline = time.monotonic() + idle_s
    while cluster.is_whole and time.monotonic() < deadline:
        if cluster.is_wanted:
            cluster.leave()
            return
        time.sleep(_POLL_S)
    cluster.stop()


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    settings = Settings.from_environment()
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = nowhere  # what the cell shows is kept with the run
        try:
            cluster = Cluster.adopt(Path(sys.argv[1]), settings, detached_runner=True)
        except OwnedError:
            return  # a notebook was faster
        _log.info("follows the cell")
        keep(cluster, settings.keep_idle_s)
        sys.stdout = sys.__stdout__


if __name__ == "__main__":
    main()
