"""Files of the user's modules on a host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nbdist.cells.own_modules import digest_of
from nbdist.records import ModuleFile, OwnModule
from nbdist.worker.remote import module_files
from nbdist.worker.runtime import context
from tests.worker.own_modules.test_finder import finder

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.worker.own_modules.finder import OwnFinder

__all__ = ["finder"]

TEXTS = {"mf_pack/__init__.py": b"value = 1", "mf_pack/table.txt": b"first"}


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "current", lambda: SimpleNamespace(rank=3))


def module(texts: dict[str, bytes], folder: Path) -> OwnModule:
    """Return a module whose files are in a folder of the notebook's machine."""
    files = {
        place: ModuleFile(source=str(folder / place), digest=digest_of(text), size_bytes=len(text))
        for place, text in texts.items()
    }
    return OwnModule(name="mf_pack", files=files)


def contents(texts: dict[str, bytes]) -> dict[str, bytes]:
    return {digest_of(text): text for text in texts.values()}


def write(folder: Path, texts: dict[str, bytes]) -> None:
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(text)


def test_files_with_the_same_content_are_used_in_place(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    placed = module_files.place([module(TEXTS, tmp_path)], {3: str(tmp_path / "store")})
    assert (placed.folders, placed.lacking, placed.fault) == ({"mf_pack": ""}, (), "")


def test_one_other_file_makes_a_copy_of_all(tmp_path: Path, finder: OwnFinder) -> None:
    write(tmp_path, {**TEXTS, "mf_pack/table.txt": b"other"})
    stores, own = {3: str(tmp_path / "store")}, module(TEXTS, tmp_path)
    assert module_files.place([own], stores).lacking == tuple(contents(TEXTS))
    assert module_files.store(contents(TEXTS), stores) == ""
    placed = module_files.place([own], stores)
    folder = tmp_path / "store" / "mf_pack"
    assert (placed.folders, placed.lacking) == ({"mf_pack": str(folder)}, ())
    assert {p: (folder / p).read_bytes() for p in TEXTS} == TEXTS
    module_files.use([own], {3: placed.folders}, stores)
    (text,) = finder.texts.values()
    assert (text.source, text.file) == (
        str(tmp_path / "mf_pack/__init__.py"),
        str(folder / "mf_pack/__init__.py"),
    )


def test_only_changed_files_are_lacking_and_the_path_stays(tmp_path: Path) -> None:
    stores, away = {3: str(tmp_path / "store")}, tmp_path / "notebook"
    module_files.store(contents(TEXTS), stores)
    before = module_files.place([module(TEXTS, away)], stores).folders["mf_pack"]
    edited = {**TEXTS, "mf_pack/table.txt": b"second"}
    own = module(edited, away)
    assert module_files.place([own], stores).lacking == (digest_of(b"second"),)
    module_files.store(contents(edited), stores)
    assert module_files.place([own], stores).folders["mf_pack"] == before
    assert (tmp_path / "store/mf_pack/mf_pack/table.txt").read_bytes() == b"second"
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {"mf_pack", *contents(edited)}


def test_files_of_earlier_contents_are_removed(tmp_path: Path) -> None:
    stores, away = {3: str(tmp_path / "store")}, tmp_path / "notebook"
    texts = {**TEXTS, "mf_pack/more/gone.txt": b"gone"}
    module_files.store(contents(texts), stores)
    module_files.place([module(texts, away)], stores)
    folder = tmp_path / "store/mf_pack/mf_pack"
    (folder / "written.txt").write_text("by a program")
    module_files.place([module(TEXTS, away)], stores)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"__init__.py", "table.txt", "written.txt"}
    module_files.place([], stores)
    assert not [*(tmp_path / "store").iterdir()]


def test_text_of_a_file_that_has_changed_since_is_the_stored_one(
    tmp_path: Path, finder: OwnFinder
) -> None:
    write(tmp_path, {**TEXTS, "mf_pack/__init__.py": b"value = 'later'"})
    stores = {3: str(tmp_path / "store")}
    module_files.store(contents(TEXTS), stores)
    module_files.use([module(TEXTS, tmp_path)], {3: {}}, stores)
    assert finder.texts["mf_pack"].text == b"value = 1"


def test_files_that_are_no_modules_are_left_out(tmp_path: Path, finder: OwnFinder) -> None:
    texts = {**TEXTS, "mf_pack/my-script.py": b""}
    write(tmp_path, texts)
    module_files.use([module(texts, tmp_path)], {3: {}}, {3: str(tmp_path / "store")})
    assert finder.texts.keys() == {"mf_pack"}


def test_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    stores = {3: str(tmp_path / "store")}
    assert module_files.store(contents(TEXTS), stores) == f"{tmp_path}/store: File exists"
