"""Checks of a rank before a run: connections to other ranks, shared folders and files."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nbdist.worker.remote import preflight
from nbdist.worker.remote.preflight import (
    bandwidth,
    close_ports,
    facts,
    files,
    leave_mark,
    open_ports,
    reach,
    remove_mark,
    sees_mark,
)
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HERE = "127.0.0.1"
TOKEN = "secret-token"
OPEN_S = 10.0


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process rank 1, and end its threads after a test."""
    monkeypatch.setattr(context, "_worker", SimpleNamespace(rank=1))
    yield
    close_ports()
    await_threads()


def await_threads() -> None:
    """Wait until the threads that listen, connect and answer have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("nbdist-preflight"):
            thread.join(5)


def opened(token: str = TOKEN) -> int:
    port = open_ports(["unused", HERE], token, OPEN_S)
    assert isinstance(port, int)
    return port


def test_other_ranks_are_reached() -> None:
    ports = {rank: (HERE, opened()) for rank in (0, 2, 3)}
    found = reach({**ports, 1: (HERE, 1)}, TOKEN)
    assert [(one.rank, one.fault, one.bytes_per_s) for one in found] == [
        (rank, "", 0.0) for rank in (0, 2, 3)
    ]
    assert all(0 < one.latency_s < 1 for one in found)


def test_bandwidth_is_measured_to_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SEND_S", 0.003)
    ends = {rank: (HERE, opened()) for rank in (0, 2)}
    assert bandwidth({0: 1, 1: 2}, ends, TOKEN) > 0
    assert bandwidth({0: 1, 2: 0}, ends, TOKEN) == 0, "this rank sends nothing"
    close_ports()
    await_threads()
    assert bandwidth({1: 2}, ends, TOKEN) == 0, "the connection fails"


def test_port_closes_after_its_time() -> None:
    port = open_ports(["unused", HERE], TOKEN, 0.05)
    await_threads()
    (found,) = reach({2: (HERE, port)}, TOKEN)
    assert found.fault == "Connection refused"


def test_rank_that_cannot_be_reached_is_no_error() -> None:
    with socket.socket() as free:
        free.bind((HERE, 0))
        (found,) = reach({1: (HERE, 1), 2: (HERE, free.getsockname()[1])}, TOKEN)
    assert (found.rank, found.fault) == (2, "Connection refused")


def test_another_token_is_refused() -> None:
    (found,) = reach({2: (HERE, opened("other-token"))}, TOKEN)
    assert found.fault in ("another process answers on this port", "Connection reset by peer")


def test_single_rank_reaches_nobody() -> None:
    assert reach({1: (HERE, 1)}, TOKEN) == ()


def test_closed_port_is_not_reached() -> None:
    port = opened()
    close_ports()
    await_threads()
    (found,) = reach({2: (HERE, port)}, TOKEN)
    assert found.fault == "Connection refused"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this host: "),
        ("not an address", "not an address cannot be resolved on this host: "),
    ],
)
def test_address_of_another_host_has_a_reason(address: str, reason: str) -> None:
    found = open_ports([HERE, address], TOKEN, OPEN_S)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_mark_is_seen_in_a_shared_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "b")
    assert leave_mark(folder, "mark") == ""
    assert sees_mark(folder, "mark")
    remove_mark(folder, "mark")
    remove_mark(folder, "mark")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_missing_mark_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_CONNECT_S", 0.05)
    assert not sees_mark(str(tmp_path), "mark")
    (tmp_path / "mark").write_text("of another check")
    assert not sees_mark(str(tmp_path), "mark")


def test_mark_that_cannot_be_left_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert leave_mark(str(tmp_path / "file"), "mark") == "File exists"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert leave_mark("~/shared", "mark") == ""
    assert (tmp_path / "shared" / "mark").exists()
    assert files("~/shared/*") == (1, 4, ())


def test_files_of_a_pattern_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "1.bin").write_bytes(bytes(5))
    (tmp_path / "a" / "b" / "2.bin").write_bytes(bytes(7))
    assert files(f"{tmp_path}/a/*") == (1, 5, ())
    assert files(f"{tmp_path}/**/*.bin") == (2, 12, ())
    assert files(f"{tmp_path}/missing") == (0, 0, ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: path.name != "2.bin")
    assert files("a/**/*.bin") == (2, 12, (str(tmp_path / "a" / "b" / "2.bin"),))


def test_facts_of_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    found = facts()
    assert (found.rank, found.gpus, found.driver) == (1, (), "")
    assert found.cpus > 0
    assert {"python", "nbdist", "ipyparallel"} <= found.versions.keys()


def test_gpus_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "NVIDIA A100, 1000, 250, 50, 550.54\nNVIDIA A100, 1000, [N/A], [N/A], 550.54\n"
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        preflight.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer)
    )
    found = facts()
    assert found.driver == "550.54"
    assert [(g.name, g.memory_bytes >> 20, g.used_bytes >> 20, g.busy) for g in found.gpus] == [
        ("NVIDIA A100", 1000, 250, 0.5),
        ("NVIDIA A100", 1000, 0, 0.0),
    ]


def test_driver_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise preflight.subprocess.TimeoutExpired("nvidia-smi", 3)

    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(preflight.subprocess, "run", fail)
    assert facts().gpus == ()
