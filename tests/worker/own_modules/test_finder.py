"""Import of the user's modules with the text of the notebook."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from typing import TYPE_CHECKING

import pytest

from nbdist.cells.own_modules import digest_of
from nbdist.records import ModuleFile, OwnModule
from nbdist.worker.own_modules import finder as module
from nbdist.worker.own_modules.finder import ModuleText, OwnFinder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


OWN = ("of_", "rl", "mf_")
"""Beginnings of the names of the modules in these tests."""


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnFinder]:
    """A finder that is removed after the test, with the modules that it has found."""
    from nbdist.worker.runtime import import_hooks

    monkeypatch.setattr(module, "_installed", [])
    monkeypatch.setattr(import_hooks, "_before_path", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield module.install()
    for name in sys.modules.keys() - before:
        if name.startswith(OWN):
            del sys.modules[name]


def text_of(name: str, text: str, folder: str, *, is_package: bool = False) -> ModuleText:
    beside = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
    content = text.encode()
    return ModuleText(
        name, f"/notebook/{beside}", f"{folder}/{beside}", digest_of(content), content, is_package
    )


def own(name: str) -> OwnModule:
    return OwnModule(name=name, files={"x.py": ModuleFile(source="x", digest="", size_bytes=0)})


def test_module_shows_the_path_of_the_notebook(finder: OwnFinder, tmp_path: Path) -> None:
    text = "def f():\n    raise KeyError('x')\n"
    finder.use(own("of_one"), [text_of("of_one", text, str(tmp_path))])
    found = importlib.import_module("of_one")
    assert found.__file__ == str(tmp_path / "of_one.py")
    assert inspect.getsource(found.f) == text
    with pytest.raises(KeyError) as caught:
        found.f()
    (*_, frame) = traceback.extract_tb(caught.tb)
    assert (frame.filename, frame.line) == ("/notebook/of_one.py", "raise KeyError('x')")
    assert [name for name, _, _ in finder.loaded()] == ["of_one"]


def test_text_of_the_notebook_precedes_the_file_on_the_path(
    finder: OwnFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_two.py").write_text("value = 'disk'")
    (tmp_path / "of_other.py").write_text("value = 'disk'")
    finder.use(own("of_two"), [text_of("of_two", "value = 'notebook'", str(tmp_path))])
    assert importlib.import_module("of_two").value == "notebook"
    assert importlib.import_module("of_other").value == "disk"
    assert finder.from_disk() == {"of_other": digest_of(b"value = 'disk'")}
    assert finder.from_disk() == {}


def test_packages_without_init_have_submodules(finder: OwnFinder, tmp_path: Path) -> None:
    texts = [text_of("of_space.a.b", "value = 1", str(tmp_path))]
    finder.use(own("of_space"), texts)
    assert importlib.import_module("of_space.a.b").value == 1
    assert list(sys.modules["of_space.a"].__path__) == [str(tmp_path / "of_space/a")]


def test_new_texts_replace_all_earlier_ones_of_the_module(
    finder: OwnFinder, tmp_path: Path
) -> None:
    root = text_of("of_pack", "", str(tmp_path), is_package=True)
    finder.use(own("of_pack"), [root, text_of("of_pack.gone", "", str(tmp_path))])
    finder.use(own("of_pack"), [root])
    importlib.import_module("of_pack")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("of_pack.gone")


def test_other_modules_are_forgotten_and_stay_loaded(finder: OwnFinder, tmp_path: Path) -> None:
    for name in ("of_kept", "of_loaded", "of_unused"):
        finder.use(own(name), [text_of(name, "", str(tmp_path))])
    loaded = importlib.import_module("of_loaded")
    finder.forget_others(["of_kept"])
    assert list(finder.texts) == ["of_kept"]
    assert finder.deleted == ["of_loaded"]
    assert importlib.import_module("of_loaded") is loaded
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("of_unused")


def test_module_from_the_disk_is_one_with_the_text_of_its_file(
    finder: OwnFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_early.py").write_text("value = 1")
    importlib.import_module("of_early")
    finder.use(own("of_early"), [text_of("of_early", "value = 1", str(tmp_path))])
    ((name, _, text),) = finder.loaded()
    assert (name, text.digest) == ("of_early", finder.texts["of_early"].digest)
    finder.use(own("of_early"), [text_of("of_early", "value = 2", str(tmp_path))])
    ((_, _, text),) = finder.loaded()
    assert text.digest != finder.texts["of_early"].digest


def test_loaded_package_finds_its_files_in_another_folder(
    finder: OwnFinder, tmp_path: Path
) -> None:
    finder.use(own("of_moved"), [text_of("of_moved", "", "/first", is_package=True)])
    moved = importlib.import_module("of_moved")
    finder.use(own("of_moved"), [text_of("of_moved", "", "/second", is_package=True)])
    assert moved.__file__ == "/second/of_moved/__init__.py"
    assert moved.__path__ == ["/second/of_moved"]


def test_autograph_reads_the_text(finder: OwnFinder) -> None:
    text = (
        "import tensorflow as tf\n@tf.function\ndef f(x):\n"
        "    if tf.reduce_sum(x) > 0:\n        return x\n    return -x\n"
    )
    finder.use(own("of_graph"), [text_of("of_graph", text, "/not_there")])
    function = importlib.import_module("of_graph").f.python_function
    code = sys.modules["tensorflow"].autograph.to_code(function)  # runs nothing
    assert "if_stmt" in code
