"""ipyparallel's controller with a patched heart monitor, which accepts late responses of engines.

`python -m nbdist.cluster.remote_host.heart_monitor` takes the options of the controller.

**Engines behind a slow link are lost.** `HeartMonitor.handle_pong` discards responses to all but
the last two heartbeats. nbdist sends one every 100 ms, so an engine with a round trip of more than
200 ms never registers, and one whose link is busy for 10 s counts as dead: arrays of 1 GiB from
four hosts at once made it so. The patch counts each response. Fork servers find dead engines.

Observed with ipyparallel 9.2.0. `tests/cluster/remote_host/test_heart_monitor.py` fails when the
patch is no longer needed.
"""

from __future__ import annotations

from typing import Any

from ipyparallel.controller import app
from ipyparallel.controller.heartmonitor import HeartMonitor


def apply() -> None:
    """Let heart monitors of this process and of forked ones count late responses."""
    HeartMonitor.handle_pong = _count_response


def _count_response(monitor: Any, message: list[bytes]) -> None:
    monitor.responses.add(message[0])


if __name__ == "__main__":
    apply()
    app.main()
