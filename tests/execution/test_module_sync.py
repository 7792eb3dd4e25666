"""Own modules of the user: what is sent to which ranks, and what a successor knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cells.own_modules import digest_of
from nbdist.errors import TransferError, UsageError
from nbdist.execution.module_sync import ModuleSync
from nbdist.records import ClusterRequest, Host, OwnModule, PlacedModules, Sync
from nbdist.worker.remote import module_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class WorkersDouble:
    """Double of the worker group, its engines, places and fork servers.

    Attributes:
        calls: functions that ranks have called, each with the ranks.
        sent: modules of the last call.
        lacking: digests of files that hosts lack until they are stored.
        fault: the reason why hosts cannot store files.
    """

    def __init__(self, folder: Path, hosts: Sequence[str], sync: Sync | None = None) -> None:
        self.request = ClusterRequest(
            hosts=tuple(Host(name=host) for host in hosts),
            frameworks=(),
            sync=sync or Sync(),
        )
        self.hellos = {r: SimpleNamespace(host=host, pid=r) for r, host in enumerate(hosts)}
        self.calls: list[tuple[str, list[int]]] = []
        self.sent: tuple[OwnModule, ...] = ()
        self.stored: dict[str, bytes] = {}
        self.lacking: tuple[str, ...] = ()
        self.fault = ""
        self.local_folder = folder

    @property
    def engines(self) -> Any:
        return SimpleNamespace(
            folder=self.local_folder,
            request=self.request,
            apply=self.apply,
            places=SimpleNamespace(host=lambda rank: self.request.hosts[rank].key),
            fleet=SimpleNamespace(folder=lambda host: f"/tmp/nbdist-{host}"),
        )

    def apply(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int]) -> list[Any]:
        self.calls.append((function.__name__, list(ranks)))
        if function is module_files.store:
            self.stored = args[0]
            self.lacking = () if not self.fault else self.lacking
            return [self.fault] * len(ranks)
        self.sent = args[0]
        if function is module_files.place:
            folders = {module.name: "/there" for module in self.sent}
            return [PlacedModules(folders=folders, lacking=self.lacking)] * len(ranks)
        return [None] * len(ranks)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module beside the notebook."""
    (tmp_path / "notebook").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "notebook"))
    path = tmp_path / "notebook" / "ms_one.py"
    path.write_text("value = 1")
    return path


def sync_of(workers: WorkersDouble) -> ModuleSync:
    group: Any = workers
    return ModuleSync(group)


def test_cells_without_own_modules_send_nothing(tmp_path: Path) -> None:
    workers = WorkersDouble(tmp_path, ["", ""])
    sync = sync_of(workers)
    sync.find("import json, msgspec")
    sync.send([0, 1])
    assert workers.calls == []
    assert not (tmp_path / "modules").exists()


def test_local_ranks_that_lack_the_modules_receive_them(tmp_path: Path, module: Path) -> None:
    workers = WorkersDouble(tmp_path, ["", "", ""])
    sync = sync_of(workers)
    sync.find("import ms_one, msgspec")
    sync.send([0, 1])
    assert workers.calls == [("use", [0, 1])]
    assert [own.name for own in workers.sent] == ["ms_one"]
    sync.find("x = 1")
    sync.send([0, 1, 2])
    assert workers.calls[1:] == [("use", [2])]
    workers.hellos[1] = SimpleNamespace(host="", pid=100)  # a fresh worker
    sync.send([0, 1, 2])
    assert workers.calls[2:] == [("use", [1])]
    module.write_text("value = 22")
    sync.find("x = 1")
    sync.send([0, 1, 2])
    assert workers.calls[3:] == [("use", [0, 1, 2])]
    assert sync.others(["ms_one", "ms_one.part", "json"]) == ["json"]


def test_files_are_sent_once_to_each_host(tmp_path: Path, module: Path) -> None:
    workers = WorkersDouble(tmp_path, ["gpu1", "gpu2", "gpu1", ""])
    workers.lacking = (digest_of(b"value = 1"),)
    sync = sync_of(workers)
    sync.find("import ms_one")
    sync.send(range(4))
    assert workers.calls == [
        ("place", [0, 1]),
        ("store", [0, 1]),
        ("place", [0, 1]),
        ("use", [0, 1, 2, 3]),
    ]
    assert workers.stored == {digest_of(b"value = 1"): b"value = 1"}


def test_hosts_that_cannot_store_files_are_named(tmp_path: Path, module: Path) -> None:
    workers = WorkersDouble(tmp_path, ["gpu1", "gpu2"])
    workers.lacking, workers.fault = (digest_of(b"value = 1"),), "/there: No space left on device"
    sync = sync_of(workers)
    sync.find("import ms_one")
    with pytest.raises(TransferError) as caught:
        sync.send([0, 1])
    text = str(caught.value)
    assert "  gpu1: /there: No space left on device\n  gpu2: /there: No space" in text
    workers.fault = ""
    sync.send([0, 1])
    assert workers.calls[-1] == ("use", [0, 1])


def test_successor_sends_the_stored_modules(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync_of(WorkersDouble(tmp_path, ["", ""])).find("import ms_one")
    monkeypatch.setattr("sys.path", [])
    module.write_text("value = 22")
    workers = WorkersDouble(tmp_path, ["", ""])
    successor = sync_of(workers)
    successor.find("x = 1")
    successor.send([0, 1])
    (own,) = workers.sent
    (file,) = own.files.values()
    assert (tmp_path / "modules" / file.digest).read_bytes() == b"value = 1"


def test_ranks_forget_a_module_whose_file_is_gone(tmp_path: Path, module: Path) -> None:
    workers = WorkersDouble(tmp_path, ["", ""])
    sync = sync_of(workers)
    sync.find("import ms_one")
    sync.send([0, 1])
    module.unlink()
    sync.find("x = 1")
    sync.send([0, 1])
    assert workers.calls == [("use", [0, 1])] * 2
    assert workers.sent == ()
    assert sync.digests() == {}


def test_contents_that_no_module_needs_are_removed(tmp_path: Path, module: Path) -> None:
    sync = sync_of(WorkersDouble(tmp_path, [""]))
    for text in ("value = 1", "value = 22", "value = 333"):
        module.write_text(text)
        sync.find("import ms_one")
    names = {path.name for path in (tmp_path / "modules").iterdir()}
    assert names == {"modules.msgpack", digest_of(b"value = 333")}


def test_nothing_is_found_if_sync_is_off(tmp_path: Path, module: Path) -> None:
    workers = WorkersDouble(tmp_path, [""])
    workers.request = ClusterRequest(hosts=(Host(),), frameworks=(), sync=None)
    sync = sync_of(workers)
    sync.find("import ms_one")
    sync.send([0])
    assert workers.calls == []


def test_notebook_without_space_is_reported(tmp_path: Path, module: Path) -> None:
    (tmp_path / "modules").write_text("a file")
    sync = sync_of(WorkersDouble(tmp_path, [""]))
    with pytest.raises(UsageError, match=r"your modules cannot be stored in .*File exists"):
        sync.find("import ms_one")
