"""Late responses of engines to the controller's heartbeats."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from ipyparallel.controller.heartmonitor import HeartMonitor

from nbdist.cluster.remote_host import heart_monitor


def counted(response: bytes) -> set[bytes]:
    """Return the engines that respond, if one responds to a heartbeat of an age."""
    state = {"lifetime": 3.0, "last_ping": 2.0, "tic": 0.0, "debug": False, "responses": set()}
    monitor: Any = SimpleNamespace(**state, log=logging.getLogger("test"))
    HeartMonitor.handle_pong(monitor, [b"engine", response])
    return monitor.responses


def test_late_responses_count(monkeypatch: Any) -> None:
    assert counted(b"3.0") == counted(b"2.0") == {b"engine"}
    assert not counted(b"1.0")  # else the patch is no longer needed
    monkeypatch.setattr(HeartMonitor, "handle_pong", HeartMonitor.handle_pong)
    heart_monitor.apply()
    assert counted(b"3.0") == counted(b"1.0") == {b"engine"}
