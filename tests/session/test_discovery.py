"""Clusters of other notebooks: which are found, offered, refused and left alone.

A listening socket represents the fork server of a running cluster. No process is started.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from nbdist._version import __version__
from nbdist.cluster.forkserver.control_socket import FORK_SERVER_SOCKET, listen
from nbdist.cluster.handover import HANDOVER_FILE
from nbdist.errors import OwnedError, UsageError, VersionError
from nbdist.records import (
    BoundSocket,
    CellRequest,
    ClusterRequest,
    HandoverState,
    Host,
    RunningCell,
    Writer,
)
from nbdist.session import discovery
from nbdist.session.discovery import Found, attach, offer, stop_all
from nbdist.utils.processes import process_of, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIRST, SECOND, THIRD = "00000000000a", "00000000000b", "00000000000c"
SOCKET = BoundSocket(port=1, public_key=b"public", secret_key=b"secret")
GONE = msgspec.structs.replace(this_process(), started=this_process().started - 10)
INIT = process_of(1)
"""Identity of a running process that is not this one."""


def new_state(cluster: str, **changes: object) -> HandoverState:
    usual = HandoverState(
        id=cluster,
        request=ClusterRequest(hosts=(Host(),) * 2, frameworks=("jax",)),
        owner=GONE,
        stream=SOCKET,
        dispatch=SOCKET,
        nbdist=__version__,
    )
    return msgspec.structs.replace(usual, **changes)


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that creates the folder of a cluster, which runs unless `runs=False`."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    sockets = []

    def create(cluster: str, *, runs: bool = True, **changes: Any) -> Path:
        folder = tmp_path / "nbdist" / cluster
        folder.mkdir(parents=True)
        state = msgspec.to_builtins(new_state(cluster, **changes))
        (folder / HANDOVER_FILE).write_text(json.dumps(state))
        if runs:
            sockets.append(listen(folder / FORK_SERVER_SOCKET))
        return folder

    yield create
    for socket in sockets:
        socket.close()


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders of the clusters that were taken over. A double of `Cluster.adopt`."""
    folders: list[Path] = []
    monkeypatch.setattr(
        discovery.Cluster, "adopt", lambda folder, _settings: folders.append(folder)
    )
    return folders


# Attach.


def test_the_only_free_cluster_is_taken_over(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    create(FIRST, owner=INIT)
    free = create(SECOND)
    create(THIRD, runs=False)
    attach()
    assert adopted == [free]


def test_the_cluster_of_a_detached_runner_is_free(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    free = create(FIRST, owner=INIT, detached_runner=True)
    attach()
    assert adopted == [free]


def test_one_of_several_clusters_is_chosen_by_its_id(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    folders = [create(FIRST), create(SECOND)]
    with pytest.raises(UsageError) as error:
        attach()
    assert str(error.value) == (
        "found 2 clusters: run %dist_attach with an id\n"
        f"  cluster {FIRST} (2 workers)\n  cluster {SECOND} (2 workers)"
    )
    attach(SECOND)
    assert adopted == folders[1:]


def test_a_cluster_of_another_kernel_is_refused(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    create(FIRST, owner=INIT)
    for cluster in ("", FIRST):
        with pytest.raises(OwnedError) as error:
            attach(cluster)
        assert error.value.pid == 1
    assert adopted == []


@pytest.mark.parametrize(
    ("chosen", "what"),
    [("", "no cluster of an earlier notebook"), (SECOND, f"no cluster {SECOND}")],
)
def test_a_missing_cluster_is_reported(
    create: Callable[..., Path], adopted: list[Path], chosen: str, what: str
) -> None:
    create(FIRST, runs=False)
    with pytest.raises(UsageError, match=f"^found {what}: run %dist_start 4 hosts for a new one$"):
        attach(chosen)
    assert adopted == []


def test_a_free_cluster_of_another_version_has_precedence_over_owned_ones(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    create(FIRST, owner=INIT)
    create(SECOND, nbdist="9.9.9", owner=this_process())
    with pytest.raises(OwnedError) as error:
        attach()
    assert error.value.pid == 1
    create(THIRD, nbdist="9.9.8")
    with pytest.raises(VersionError, match=r"started by nbdist 9\.9\.8"):
        attach()
    with pytest.raises(OwnedError):
        attach(SECOND)
    assert adopted == []


def test_the_cluster_of_this_process_is_not_found(
    create: Callable[..., Path], adopted: list[Path]
) -> None:
    create(FIRST, owner=this_process())
    with pytest.raises(UsageError, match="no cluster of an earlier notebook"):
        attach()
    assert offer() == ""


@pytest.mark.usefixtures("adopted")
def test_other_folders_are_skipped(create: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        attach()  # without the folder of clusters
    create("0123")
    create(FIRST.upper())
    real = create(SECOND)
    (tmp_path / "nbdist" / THIRD).symlink_to(real)
    (real / HANDOVER_FILE).write_text("{")
    with pytest.raises(UsageError):
        attach()


# Offer.


def test_free_clusters_are_offered_with_their_running_cells(create: Callable[..., Path]) -> None:
    assert offer() == ""
    request = CellRequest(number=3, source="x", label=7, strategy=None, awaits=False)
    create(FIRST, cell=RunningCell(request=request, ranks=(0, 1)))
    first = f"cluster {FIRST} (2 workers, cell 7 running)"
    remedy = "run %dist_attach to take over, or %dist_stop --all to end"
    assert offer() == f"nbdist: {first} of an earlier notebook is still running: {remedy}"
    create(SECOND, request=ClusterRequest(hosts=(Host(),), frameworks=()))
    create(THIRD, owner=INIT)
    create("00000000000d", runs=False)
    second = f"cluster {SECOND} (1 worker)"
    assert (
        offer() == f"nbdist: {first}, {second} of an earlier notebook are still running: {remedy}"
    )


def test_clusters_of_another_version_are_offered_on_their_own_lines(
    create: Callable[..., Path],
) -> None:
    create(FIRST, nbdist="9.9.9")
    create(SECOND, nbdist="9.9.8", owner=INIT)
    create(THIRD, nbdist="9.9.7", runs=False)
    (line,) = offer().splitlines()
    assert line.startswith(f"nbdist: cluster {FIRST} was started by nbdist 9.9.9, and")
    create("00000000000d")
    assert len(offer().splitlines()) == 2


def test_the_owner_of_a_found_cluster_is_known(tmp_path: Path) -> None:
    def is_owned(owner: Writer, *, detached_runner: bool = False) -> bool:
        state = new_state(FIRST, owner=owner, detached_runner=detached_runner)
        return Found(tmp_path, state).is_owned

    assert INIT is not None
    assert is_owned(INIT)
    assert not is_owned(INIT, detached_runner=True)
    assert not is_owned(GONE)
    assert is_owned(msgspec.structs.replace(GONE, host="elsewhere"))  # its state is unknown here


# Stop. The fork servers have died.


def test_a_folder_without_processes_is_deleted(create: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "nbdist" / FIRST.upper()).mkdir(parents=True)
    (tmp_path / "nbdist" / THIRD).symlink_to(tmp_path / "outside")
    folders = [create(FIRST, runs=False), create(SECOND, runs=False)]
    assert stop_all() == (f"cluster {FIRST} was ended", f"cluster {SECOND} was ended")
    assert not any(folder.exists() for folder in folders)
    assert stop_all() == ()


def test_clusters_that_may_be_in_use_are_left_alone(create: Callable[..., Path]) -> None:
    owned = create(FIRST, runs=False, owner=INIT)
    other = create(SECOND, runs=False, nbdist="9.9.9")
    damaged = create(THIRD, runs=False)
    (damaged / HANDOVER_FILE).write_text("{")
    first, second, third = stop_all()
    assert first == f"cluster {FIRST} belongs to pid 1: left alone"
    assert second == f"{other} of nbdist 9.9.9 is left alone: none of its processes responds"
    assert third.startswith(f"{damaged} is left alone, because it cannot be read: ")
    assert owned.exists()
    assert other.exists()
    assert damaged.exists()


def test_only_processes_with_the_stored_start_time_are_ended(
    create: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    for how in ("terminate", "kill"):
        monkeypatch.setattr(psutil.Process, how, lambda _process, how=how: ended.append(how))
    monkeypatch.setattr(discovery, "_END_S", 0.0)
    create(FIRST, runs=False, controllers=(GONE,))
    stop_all()
    assert ended == []  # another process uses the pid now
    create(SECOND, runs=False, controllers=(GONE, this_process()))
    assert stop_all() == (f"cluster {SECOND} was ended",)
    assert ended == ["terminate", "kill"]
