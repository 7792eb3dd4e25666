"""Files of the modules that a program imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nbdist.cells.own_modules import own_modules


@pytest.fixture(autouse=True)
def notebook_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_module_that_is_no_python_is_copied(notebook_folder: Path) -> None:
    write(notebook_folder, {"my_draft.py": "def (\n"})
    assert own_modules(["my_draft"]).files.keys() == {Path("my_draft.py")}
