"""Files of the modules that cells and programs import."""

from __future__ import annotations

import sys
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbdist.cells.own_modules import OwnModuleFinder, imports_of_cell
from nbdist.errors import UsageError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from nbdist.cells.own_modules import OwnModules


@pytest.fixture(autouse=True)
def notebook_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_modules(names: list[str]) -> OwnModules:
    return OwnModuleFinder().find(names)


def write(folder: Path, texts: dict[str, str]) -> None:
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)


def test_modules_and_their_imports_are_found(notebook_folder: Path) -> None:
    own = {
        "my_layers.py": "import json\nimport numpy\nfrom my_models.blocks import Block\n",
        "my_models/__init__.py": "from . import blocks\n",
        "my_models/blocks.py": "import my_consts as c\n",
        "my_models/deep/inner.py": "",
        "my_consts.py": "import my_models\n",
        "not_used.py": "",
    }
    write(notebook_folder, {**own, "my_models/notes.txt": "no Python"})
    files, missing = own_modules(["my_layers", "numpy", "json", "jax"])
    assert missing == []
    assert files.keys() == {Path(place) for place in own if place != "not_used.py"}
    for place, file in files.items():
        assert file.path.read_text() == own[str(place)]


def test_module_that_is_not_found_is_named() -> None:
    assert own_modules(["not_beside_the_notebook"]).missing == ["not_beside_the_notebook"]


def test_links_to_folders_around_are_left_out(notebook_folder: Path) -> None:
    write(notebook_folder, {"my_package/__init__.py": "", "my_package/sub/part.py": ""})
    for name in ("one", "two"):
        (notebook_folder / "my_package" / "sub" / name).symlink_to(notebook_folder / "my_package")
    found = {str(path) for path in own_modules(["my_package"]).files}
    assert found == {"my_package/__init__.py", "my_package/sub/part.py"}


def test_module_that_is_no_python_is_copied(notebook_folder: Path) -> None:
    write(notebook_folder, {"my_draft.py": "def (\n"})
    assert own_modules(["my_draft"]).files.keys() == {Path("my_draft.py")}


def paths(found: OwnModules) -> set[str]:
    return {str(place) for place in found.files}


def test_packages_are_found_with_their_data(notebook_folder: Path) -> None:
    own = ("own_pack/__init__.py", "own_pack/a/x.py", "own_pack/a/table.csv")
    others = (
        "own_pack/__pycache__/x.pyc",
        "own_pack/.git/config",
        "own_pack/.ipynb_checkpoints/x.py",
        "own_pack/env/pyvenv.cfg",
        "own_pack/env/lib/y.py",
        "own_pack/a/large.bin",
        "own_pack/drafts/z.py",
    )
    write(notebook_folder, dict.fromkeys((*own, *others), ""))
    finder = OwnModuleFinder(exclude=["*.bin", "own_pack/drafts"])
    assert paths(finder.find(["own_pack"])) == set(own[:2])
    finder.with_data = True
    assert paths(finder.find(["own_pack"])) == set(own)


def test_packages_without_init_are_found_and_folders_without_python_are_not(
    notebook_folder: Path,
) -> None:
    write(notebook_folder, {"own_space/part.py": "", "own_data/table.csv": ""})
    found = own_modules(["own_space", "own_data"])
    assert (paths(found), found.missing) == ({"own_space/part.py"}, ["own_data"])


def test_files_are_read_again_only_after_a_change(notebook_folder: Path) -> None:
    stored: list[bytes] = []
    write(notebook_folder, {"own_one.py": "import own_two\n", "own_two.py": ""})
    finder = OwnModuleFinder(store=lambda _digest, content: stored.append(content))
    first = finder.find(["own_one"])
    assert finder.find(["own_one"]) == first
    assert stored == [b"import own_two\n", b""]
    write(notebook_folder, {"own_one.py": "longer = 1\n"})
    assert paths(finder.find(["own_one"])) == {"own_one.py"}
    assert len(stored) == 3


def test_modules_of_further_folders_are_all_found(tmp_path: Path) -> None:
    write(tmp_path / "library", {"own_plug.py": "", "own_plugs/__init__.py": "", "notes/a.txt": ""})
    found = OwnModuleFinder(folders=[str(tmp_path / "library")]).find([])
    assert paths(found) == {"own_plug.py", "own_plugs/__init__.py"}


def test_packages_installed_from_a_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "src", {"own_edit/__init__.py": ""})

    class Editable:
        """Finder of a package, as setuptools installs it by `pip install -e`."""

        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            path = tmp_path / "src" / name / "__init__.py"
            return spec_from_file_location(name, path) if path.exists() else None

    monkeypatch.setattr("sys.meta_path", [*sys.meta_path, Editable])
    assert paths(own_modules(["own_edit"])) == {"own_edit/__init__.py"}


@pytest.mark.parametrize(
    ("name", "owner"), [("colorsys", "Python's standard library"), ("msgspec", "an installed")]
)
def test_names_of_other_modules_are_refused(notebook_folder: Path, name: str, owner: str) -> None:
    write(notebook_folder, {f"{name}.py": ""})
    text = f"your module {notebook_folder}/{name}.py has the name of {owner}"
    with pytest.raises(UsageError, match=text):
        own_modules([name])


def test_unreadable_file_is_named(notebook_folder: Path) -> None:
    write(notebook_folder, {"own_pack/__init__.py": ""})
    (notebook_folder / "own_pack/gone.py").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"own_pack/gone.py cannot be read \(No such file"):
        own_modules(["own_pack"])


def test_file_that_changes_while_it_is_read_is_refused(
    notebook_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(notebook_folder, {"own_log.py": ""})
    read = Path.read_bytes

    def reading(path: Path) -> bytes:
        content = read(path)
        path.write_bytes(content + b"#")
        return content

    monkeypatch.setattr(Path, "read_bytes", reading)
    with pytest.raises(UsageError, match=r"own_log\.py changes while it is read"):
        own_modules(["own_log"])


def test_too_many_bytes_are_refused_before_they_are_read(notebook_folder: Path) -> None:
    write(notebook_folder, {"own_pack/__init__.py": "", "own_pack/large.bin": ""})
    with (notebook_folder / "own_pack/large.bin").open("wb") as file:
        file.truncate(1 << 40)
    finder = OwnModuleFinder()
    assert paths(finder.find(["own_pack"])) == {"own_pack/__init__.py"}
    finder.with_data = True
    with pytest.raises(UsageError, match=r"own_pack/large.bin \(1048576 MiB\), out of its package"):
        finder.find(["own_pack"])


def test_imports_of_a_cell() -> None:
    cell = "%matplotlib inline\nimport a.b, c as d\nfrom e.f import g\ndef h():\n    import i\n!ls"
    assert imports_of_cell(cell) == ("a", "c", "e", "i")
    assert imports_of_cell("x = (") == imports_of_cell("import (") == ()
