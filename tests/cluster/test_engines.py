"""Known problems of ipyparallel, each with the workaround that nbdist relies on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster import engines as engines_module
from nbdist.cluster.engines import Engines
from nbdist.cluster.fleet import Fleet
from nbdist.cluster.rank_places import Places
from nbdist.errors import StartError
from nbdist.records import ClusterRequest, Host
from nbdist.settings import Settings
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FREEZE_S = 7.0  # longer than the 5 s that an engine waits by default


def new_engines(folder: Path, hosts: int) -> Engines:
    (folder / "log").mkdir()
    (folder / "security").mkdir()
    request = ClusterRequest(hosts=(Host(),) * hosts, frameworks=())
    return Engines(request, folder, 25, Fleet.start(request, folder, Settings()))


def bring_up(folder: Path, *, freeze: bool) -> list[int]:
    """Start one engine. With `freeze`, the controller does not respond for `FREEZE_S` seconds."""
    engines = new_engines(folder, hosts=1)
    try:
        engines.controller.start()
        engines.await_imports()
        controller = engines.controller.cluster.controller.pid
        if freeze:
            os.kill(controller, signal.SIGSTOP)
            threading.Timer(FREEZE_S, os.kill, (controller, signal.SIGCONT)).start()
        started = time.monotonic()
        engines.launch()
        engines.connect()
        assert not freeze or time.monotonic() - started > FREEZE_S - 1
        return engines.apply(os.getpid)
    finally:
        engines.stop()


@pytest.mark.full
def test_a_slow_controller_loses_no_engine(tmp_path: Path) -> None:
    assert len(bring_up(tmp_path, freeze=True)) == 1


@pytest.mark.full
def test_an_engine_is_lost_without_the_workaround(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [a for a in engines_module.ENGINE_ARGS if not a.startswith("--IPEngine.timeout")]
    monkeypatch.setattr(engines_module, "ENGINE_ARGS", tuple(arguments))
    with pytest.raises(StartError, match="rank 0 died during its start") as error:
        bring_up(tmp_path, freeze=True)
    assert "Registration timed out" in str(error.value)


@pytest.mark.processes
@pytest.mark.parametrize("ends_first", [False, True])
def test_an_engine_that_cannot_start_is_reported_with_its_log(
    ends_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second case, it ends before nbdist looks at it for the first time."""
    monkeypatch.setattr(
        engines_module, "ENGINE_ARGS", (*engines_module.ENGINE_ARGS, "--IPEngine.timeout=soon")
    )
    spawn = Fleet.spawn

    def spawn_and_await_the_end(fleet: Fleet, host: str, name: str, *args: Any) -> None:
        spawn(fleet, host, name, *args)
        assert repeat_until(lambda: bool(fleet.describe_end(name, 1)), 20)
        assert repeat_until(lambda: name not in fleet.pids(), 20)

    if ends_first:
        monkeypatch.setattr(Fleet, "spawn", spawn_and_await_the_end)
    with pytest.raises(StartError, match="rank 0 died") as error:
        bring_up(tmp_path, freeze=False)
    assert "timeout" in str(error.value)


@pytest.mark.processes
def test_a_rank_keeps_its_number_for_any_engine_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Places.own
    monkeypatch.setattr(Places, "own", lambda self: real(self)[::-1])
    engines = new_engines(tmp_path, hosts=2)
    try:
        engines.controller.start()
        engines.await_imports()
        for _ in range(3):  # restarts assign new ids
            engines.launch()
            engines.connect()
            assert engines.apply(os.getenv, "NBDIST_RANK") == ["0", "1"]
            engines.restart()
        assert min(engines._previous_ids) < 2
        assert max(engines._previous_ids) >= 4
    finally:
        engines.stop()


@pytest.mark.processes
def test_death_of_a_registered_engine_during_the_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has registered and received the request for its rank.

    It dies before it responds.
    """
    engines = new_engines(tmp_path, hosts=2)
    ask, wait = engines._request_places, engines._await

    def freeze_and_ask() -> None:
        if engines.controller.client.ids and not killed:
            os.kill(engines.pids()[1], signal.SIGSTOP)
        ask()

    def kill_and_wait(answer: Any, check: Callable[[], None]) -> None:
        if not killed:
            killed.append(engines.pids()[1])
            os.kill(killed[0], signal.SIGKILL)
        wait(answer, check)

    killed: list[int] = []
    try:
        engines.controller.start()
        engines.await_imports()
        engines.launch()
        assert repeat_until(lambda: len(engines.controller.client.ids) == 2, 25)
        monkeypatch.setattr(engines, "_request_places", freeze_and_ask)
        monkeypatch.setattr(engines, "_await", kill_and_wait)
        with pytest.raises(StartError, match="rank 1 died during its start"):
            engines.connect()
    finally:
        engines.stop()
