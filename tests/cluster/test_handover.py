"""Handover state: changes of the file, other versions, and foreign or incomplete state."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist._version import __version__
from nbdist.cluster.handover import (
    HANDOVER_FILE,
    HandoverFile,
    clusters_folder,
    inherit,
    new_folder,
    read_handover,
)
from nbdist.errors import StartError, VersionError
from nbdist.records import (
    HANDOVER_VERSION,
    BoundSocket,
    CellOptions,
    CellRequest,
    ClusterRequest,
    HandoverState,
    Host,
    LostRanks,
    RunningCell,
    WorkerHello,
    Writer,
)
from nbdist.utils.files import LateFiles
from nbdist.utils.processes import this_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLUSTER = "0123456789ab"
SOCKET = BoundSocket(port=1, public_key=b"public", secret_key=b"secret")
HELLO = WorkerHello(rank=0, host="here", pid=2, versions={})


def new_state(**changes: object) -> HandoverState:
    usual = HandoverState(
        id=CLUSTER,
        request=ClusterRequest(hosts=(Host(),), frameworks=("jax",)),
        owner=gone_writer(),
        stream=SOCKET,
        dispatch=SOCKET,
        nbdist=__version__,
    )
    return msgspec.structs.replace(usual, **changes)


def gone_writer() -> Writer:
    """Return the identity of an earlier process with the pid of this one."""
    return msgspec.structs.replace(this_process(), started=this_process().started - 10)


def new_cell(*, detach: bool = False) -> RunningCell:
    request = CellRequest(
        number=1,
        source="x",
        label=1,
        strategy=None,
        awaits=False,
        options=CellOptions(detach=detach),
    )
    return RunningCell(request=request, ranks=(0, 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / CLUSTER
    folder.mkdir()
    return folder


class CountedFiles(LateFiles):
    """Writer of files that counts how often its caller has waited for the disk."""

    waits = 0

    def settle(self) -> None:
        self.waits += 1
        super().settle()


@pytest.fixture
def files() -> Iterator[CountedFiles]:
    files = CountedFiles()
    yield files
    files.close()


def write(folder: Path, state: HandoverState, name: str = HANDOVER_FILE, **raw: Any) -> None:
    """Write a state. `raw` replaces fields of the JSON object."""
    (folder / name).write_text(json.dumps(msgspec.to_builtins(state) | raw))


# Changes.


def test_each_change_is_written_for_this_user_only(folder: Path, files: CountedFiles) -> None:
    file = HandoverFile(folder, new_state(), files)
    file.update(cells=3)
    files.settle()
    assert read_handover(folder) == file.handover == new_state(cells=3)
    assert (folder / HANDOVER_FILE).stat().st_mode & 0o777 == 0o600


def test_a_cell_is_on_disk_when_it_is_sent(folder: Path, files: CountedFiles) -> None:
    file = HandoverFile(folder, new_state(loss=LostRanks(ranks=(1,), reason="killed")), files)
    cell = new_cell(detach=True)
    file.begin(cell, ("first", "x"))
    files.settle()
    assert read_handover(folder).cell is None
    request = msgspec.structs.replace(cell.request, number=7)
    file.sent(request, detached_runner=True)
    assert files.waits == 2  # the cell may outlive this process
    written = read_handover(folder)
    assert written.cell == msgspec.structs.replace(cell, request=request)
    assert (written.cells, written.loss, written.ran) == (7, None, ("first", "x"))
    assert written.detached_runner


def test_a_cell_on_fewer_ranks_is_written_when_sent(folder: Path, files: CountedFiles) -> None:
    file = HandoverFile(folder, new_state(), files)
    file.shrunk((0,))
    file.opened(("w",))
    assert file.handover.cell is None
    cell = new_cell(detach=True)
    file.begin(cell, ())
    file.opened(("w",))
    file.shrunk((1,))
    files.settle()
    written = read_handover(folder).cell
    assert written is not None
    assert (written.saved, written.ranks) == (("w",), (0, 1))
    file.sent(cell.request)
    written = read_handover(folder).cell
    assert written is not None
    assert (written.saved, written.ranks) == (("w",), (1,))


def test_a_loss_is_on_disk_before_ranks_are_replaced(folder: Path, files: CountedFiles) -> None:
    file = HandoverFile(folder, new_state(), files)
    loss = LostRanks(ranks=(1,), reason="killed")
    file.lose(loss)
    assert files.waits == 1
    assert read_handover(folder).loss == loss


def test_the_last_cell_stays_until_another_one_ends(folder: Path, files: CountedFiles) -> None:
    file = HandoverFile(folder, new_state(), files)
    cell = new_cell()
    file.begin(cell, ())
    file.sent(cell.request)
    assert files.waits == 0
    file.settle()
    file.settle(cells=2)
    assert (file.handover.cell, file.handover.last, file.handover.cells) == (None, cell, 2)


# Reading.


def test_a_state_of_another_version_is_refused(folder: Path) -> None:
    write(folder, new_state(nbdist="9.9.9"))
    with pytest.raises(VersionError) as error:
        read_handover(folder)
    assert str(error.value).startswith(
        f"cluster {CLUSTER} was started by nbdist 9.9.9, and this is nbdist {__version__}: "
    )
    assert error.value.owner_pid is None


def test_another_format_is_named_and_its_content_is_not_read(folder: Path) -> None:
    write(folder, new_state(), version=HANDOVER_VERSION + 1, request="another type")
    with pytest.raises(VersionError) as error:
        read_handover(folder)
    started_by = f"nbdist {__version__} (state format {HANDOVER_VERSION + 1})"
    assert error.value.started_by == started_by
    assert f"this is nbdist {__version__} (state format {HANDOVER_VERSION}):" in str(error.value)


def test_the_file_of_the_first_version_is_found(folder: Path) -> None:
    (folder / "estate.json").write_text('{"version": 1}')
    with pytest.raises(VersionError, match=r"by a version of nbdist before 0\.2\.0"):
        read_handover(folder)
    write(folder, new_state())
    assert read_handover(folder) == new_state()


@pytest.mark.parametrize(
    ("fields", "is_owned"),
    [
        ({}, True),
        ({"detached_runner": True}, False),
        ({"keeper": True}, False),
        ({"owner": "another type"}, False),
        ({"owner": msgspec.to_builtins(gone_writer())}, False),
    ],
)
def test_the_running_kernel_that_owns_another_version_is_known(
    folder: Path, fields: dict[str, Any], is_owned: bool
) -> None:
    write(folder, new_state(nbdist="9.9.9", owner=this_process()), **fields)
    with pytest.raises(VersionError) as error:
        read_handover(folder)
    assert error.value.owner_pid == (os.getpid() if is_owned else None)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"version": "3"}', b'{"version": 3, "nbdist": 4}']
)
def test_damaged_content_is_refused(folder: Path, content: bytes) -> None:
    (folder / HANDOVER_FILE).write_bytes(content)
    with pytest.raises(msgspec.DecodeError):
        read_handover(folder)


def test_the_state_of_another_folder_is_refused(tmp_path: Path, folder: Path) -> None:
    write(folder, new_state(id="ba9876543210"))
    with pytest.raises(msgspec.DecodeError, match="is not the folder of cluster ba9876543210"):
        read_handover(folder)
    other = tmp_path / "notes"
    other.mkdir()
    write(other, new_state(id="notes"))
    with pytest.raises(msgspec.DecodeError, match="is not the folder of cluster notes"):
        read_handover(other)


def test_a_file_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, new_state())
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match="another user owns it"):
        read_handover(folder)


def test_links_to_a_state_are_not_followed(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real", new_state())
    (folder / HANDOVER_FILE).symlink_to(tmp_path / "real" / HANDOVER_FILE)
    with pytest.raises(OSError, match="symbolic link"):
        read_handover(folder)


# Successors.


@pytest.mark.parametrize("detached_runner", [True, False])
def test_a_successor_owns_the_state(folder: Path, detached_runner: bool) -> None:
    write(folder, new_state(hellos=(HELLO,), detached_runner=not detached_runner))
    inherited = inherit(folder, detached_runner=detached_runner)
    assert inherited == new_state(
        hellos=(HELLO,), owner=this_process(), detached_runner=detached_runner
    )


def test_a_cluster_without_a_state_cannot_be_taken_over(folder: Path) -> None:
    with pytest.raises(StartError, match=r"cannot be taken over \(.*run %dist_stop --all$"):
        inherit(folder, detached_runner=False)
    (folder / HANDOVER_FILE).write_text("{")
    with pytest.raises(StartError, match=r"cannot be taken over \(.*run %dist_stop --all$"):
        inherit(folder, detached_runner=False)


def test_a_cluster_that_was_starting_cannot_be_taken_over(folder: Path) -> None:
    write(folder, new_state())
    with pytest.raises(StartError, match="had not finished when its notebook ended"):
        inherit(folder, detached_runner=False)


def test_a_new_folder_is_accessible_to_this_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    folder = new_folder()
    assert folder.parent == clusters_folder() == tmp_path / "nbdist"
    write(folder, new_state(id=folder.name))
    assert read_handover(folder).id == folder.name
    for path in (folder, folder / "log", folder / "security"):
        assert path.stat().st_mode & 0o777 == 0o700
