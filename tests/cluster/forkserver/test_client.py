"""State of a fork server, computed from its events, and the first answer to an owner."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster.forkserver.client import ForkServerProcess, ForkServerState
from nbdist.cluster.forkserver.control_socket import KERNEL, Peer
from nbdist.errors import OwnedError, StartError

if TYPE_CHECKING:
    from pathlib import Path

READY = {"event": "ready", "versions": {"jax": "1"}, "gpus": ["0"]}
ENDED = {"event": "ended"}


def spawned(name: str, pid: int) -> dict[str, Any]:
    return {"event": "spawned", "id": name, "pid": pid}


def exited(name: str, pid: int, code: int = 0) -> dict[str, Any]:
    return {"event": "exited", "id": name, "pid": pid, "code": code}


def state_after(*events: dict[str, Any]) -> ForkServerState:
    state = ForkServerState()
    for event in events:
        state.note(event)
    return state


def owned(**children: int) -> dict[str, Any]:
    return {
        "event": "owned",
        "pid": 9,
        "children": children,
        "versions": {"jax": "1"},
        "gpus": ["0", "1"],
        "cores": [0, 2],
        "ready": True,
    }


# State.


def test_children_run_until_their_end() -> None:
    state = state_after(spawned("a", 1), spawned("b", 2), exited("a", 1, code=3))
    assert state.pids() == {"b": 2}
    assert (state.code("a"), state.code("b"), state.code("c")) == (3, None, None)
    assert [state.has_child(name) for name in "abc"] == [True, True, False]


def test_a_late_end_does_not_concern_the_next_child_of_the_name() -> None:
    state = state_after(spawned("a", 1), spawned("a", 2), exited("a", 1, code=3))
    assert state.pids() == {"a": 2}
    assert state.code("a") is None


def test_returned_children_are_a_copy() -> None:
    state = state_after(spawned("a", 1))
    state.pids().clear()
    assert state.pids() == {"a": 1}


def test_a_new_owner_gets_the_whole_state() -> None:
    state = state_after(spawned("a", 1), spawned("b", 2), owned(b=2, c=3))
    assert state.pids() == {"b": 2, "c": 3}
    assert state.has_child("a")
    assert state.code("a") is None
    assert (state.pid, state.gpus, state.cores) == (9, ("0", "1"), (0, 2))
    assert (state.versions, state.is_ready) == ({"jax": "1"}, True)


def test_all_children_end_with_the_fork_server() -> None:
    state = state_after(READY, spawned("a", 1), {"event": "leave"}, ENDED)
    assert (state.pids(), state.has_child("a"), state.code("a")) == ({}, True, None)
    assert (state.is_ready, state.is_requested, state.is_over) == (True, True, True)
    assert (state.versions, state.gpus) == ({"jax": "1"}, ("0",))
    state.wait_end(60.0)


def test_the_first_event_of_a_kind_after_a_mark_is_found() -> None:
    state = state_after({"event": "x", "n": 1}, {"event": "y"}, {"event": "x", "n": 2})
    assert state.wait_event("x", 0.0) == {"event": "x", "n": 1}
    assert state.wait_event("x", 0.0, since=1) == {"event": "x", "n": 2}
    assert state.wait_event("x", 0.0, since=state.count()) is None


def test_a_deleted_event_is_not_found_again() -> None:
    answer = {"event": "x"}
    state = state_after(answer, {"event": "y"}, dict(answer))
    state.delete_event(answer, since=1)
    assert state.count() == 3
    assert state.wait_event("x", 0.0) == answer
    assert state.wait_event("x", 0.0, since=1) is None


@pytest.mark.parametrize("over", [{"event": "failed"}, ENDED])
def test_a_failure_answers_every_wait_without_an_answer(over: dict[str, Any]) -> None:
    state = state_after(over, {"event": "x"})
    assert state.wait_event("x", 0.0, since=1) == {"event": "x"}
    assert state.wait_event("y", 0.0, since=2) == over


def test_the_wait_for_ends_concerns_only_the_given_children() -> None:
    state = state_after(spawned("a", 1), spawned("b", 2), exited("a", 1))
    assert state.wait_ended(["a", "c"], 0.0)
    assert not state.wait_ended(["a", "b"], 0.0)


# First answer.


def connect(folder: Path, *answers: dict[str, Any]) -> tuple[ForkServerProcess, socket.socket]:
    """Become the owner of a double of a fork server, which has sent these answers."""
    here, there = socket.socketpair()
    there.sendall(b"".join(json.dumps(answer).encode() + b"\n" for answer in answers))
    try:
        return ForkServerProcess(Peer(here), KERNEL, folder, 0.05), there
    except BaseException:
        there.close()
        raise


def test_a_fork_server_with_another_owner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OwnedError) as error:
        connect(tmp_path, {"event": "refused", "pid": 12})
    assert error.value.pid == 12


def test_a_silent_fork_server_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^the fork server did not respond$"):
        connect(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "forkserver.log").write_text("ImportError: x\n")
    with pytest.raises(StartError, match=r"^the fork server did not respond:\nImportError: x$"):
        connect(tmp_path, {"event": "x"})


def test_commands_are_answered_by_events(tmp_path: Path) -> None:
    client, there = connect(tmp_path, {**owned(a=1), "pid": os.getpid()})
    peer = Peer(there)
    try:
        assert peer.read() == [{"op": "own", "role": KERNEL, "key": ""}]
        assert client.await_ready(0.0) == {"jax": "1"}
        with pytest.raises(StartError, match=r"^no event 'hello' from the fork server within 0 s$"):
            client.wait_event("hello", 0.0)
        peer.send(exited("a", 1, code=3))
        client.wait_ended(["a"], 5.0)
        assert client.describe_end("a", 2) == "its process ended with exit code 3"
        assert client.describe_end("b", 2) == ""
        client.spawn("b", "m:f", {"x": 1}, {"K": "V"})
        (command,) = peer.read()
        assert command["op"] == "spawn"
        assert (command["id"], command["target"]) == ("b", "m:f")
        peer.send(spawned("b", 2))
        assert client.wait_event("spawned", 5.0)["pid"] == 2
        with pytest.raises(StartError, match=r"^a, b did not end within 0 s$"):
            client.wait_ended(["a", "b"], 0.0)
        peer.send({"event": "failed", "module": "m", "error": "why"})
        with pytest.raises(StartError, match=r"^m could not be imported: why$"):
            client.wait_event("hello", 5.0)
    finally:
        peer.shut()
        client.leave()
        peer.close()
    assert client.state.is_over
