"""Reload of the user's modules: order, names, failures."""

from __future__ import annotations

import ast
import importlib
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.worker.own_modules import reload as module
from nbdist.worker.own_modules.reload import note_imports, reload_changed
from tests.worker.own_modules.test_finder import finder, own, text_of

if TYPE_CHECKING:
    from nbdist.worker.own_modules.finder import OwnFinder

__all__ = ["finder"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_old_objects", {})
    monkeypatch.setattr(module, "_failed", {})


def use(finder: OwnFinder, **texts: str) -> None:
    """Use texts of modules; `_` in a name separates a package from its module."""
    for name in {name.partition("_")[0] for name in texts}:
        own_texts = [
            text_of(each.replace("_", "."), text, "/host", is_package=each == name)
            for each, text in texts.items()
            if each.partition("_")[0] == name
        ]
        finder.use(own(name), own_texts)


def test_names_refer_to_new_objects(finder: OwnFinder) -> None:
    text = "N = 3\nclass A: pass\ndef f(): return 1\nmodel = A()\nones = [1]\n"
    use(finder, rla=text, rlb="from rla import f as g, N\ndef h(): return g(), N")
    rla, rlb = importlib.import_module("rla"), importlib.import_module("rlb")
    names: dict[str, Any] = {name: getattr(rla, name) for name in ("N", "A", "f", "model", "ones")}
    model = rla.model
    names |= {"other": rla.f, "three": rla.N, "instance": rla.A()}
    edited = text.replace("N = 3", "N = 4").replace("return 1", "return 2").replace("[1]", "[2]")
    use(finder, rla=edited, rlb=rlb.__loader__.module.text.decode())
    note_imports(ast.parse("from rla import N, N as three, ones, f\nbatch = 3"))
    names["batch"] = 3
    assert reload_changed(names) == ()
    assert (names["N"], names["ones"], names["three"], names["batch"]) == (4, [2], 4, 3)
    assert names["f"] is names["other"] is rla.f
    assert names["A"] is rla.A is type(names["instance"])
    assert names["model"] is model  # an object with a state stays
    assert rlb.h() == (2, 4)


def test_equal_constants_of_other_modules_stay(finder: OwnFinder) -> None:
    use(finder, rlg="DEBUG = False", rlh="import rlg\nDEBUG = False")
    rlh = importlib.import_module("rlh")
    use(finder, rlg="DEBUG = True")
    names: dict[str, Any] = {"DEBUG": False}
    reload_changed(names)
    assert sys.modules["rlg"].DEBUG
    assert (rlh.DEBUG, names["DEBUG"]) == (False, False)


def test_package_keeps_its_submodules(finder: OwnFinder) -> None:
    use(finder, rli="value = 1", rli_sub="value = 1")
    importlib.import_module("rli.sub")
    rli = sys.modules["rli"]
    use(finder, rli="value = 2", rli_sub="value = 1")
    reload_changed({})
    assert (rli.value, rli.sub.value) == (2, 1)


def test_modules_are_reloaded_after_those_that_they_import(finder: OwnFinder) -> None:
    texts = {
        "rlc": "import rlz, builtins\nvalue = rlz.value",
        "rlz": "from rlp.sub import value",
        "rlp": "from .sub import value",
        "rlp_sub": "value = 1",
    }
    use(finder, **texts)
    importlib.import_module("rlc")
    use(
        finder,
        **{name: f"{text}\n{'value = 2' * (name == 'rlp_sub')}" for name, text in texts.items()},
    )
    reload_changed({})
    assert sys.modules["rlc"].value == sys.modules["rlp"].value == 2


def test_failed_reload_keeps_the_module_and_is_not_repeated(finder: OwnFinder) -> None:
    use(finder, rld="value = 1\ndef f(): return value")
    rld = importlib.import_module("rld")
    for broken, error in (("value = 2\n1 / 0", ZeroDivisionError), ("value = (", SyntaxError)):
        use(finder, rld=broken)
        with pytest.raises(error):
            reload_changed({})
        assert rld.f() == 1
        assert reload_changed({}) == ("rld",)
    use(finder, rld="value = 3\ndef f(): return value")
    assert reload_changed({}) == ()
    assert rld.f() == 3


def test_nothing_changes_if_one_text_is_no_python(finder: OwnFinder) -> None:
    use(finder, rle="value = 1", rlf="value = 1")
    rle = importlib.import_module("rle")
    importlib.import_module("rlf")
    use(finder, rle="value = 2", rlf="value = (")
    with pytest.raises(SyntaxError):
        reload_changed({})
    assert rle.value == 1
    assert reload_changed({}) == ("rlf",)
    assert rle.value == 2


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupted_reload_is_repeated(finder: OwnFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    use(finder, rlg="import builtins\nvalue = 1")
    rlg = importlib.import_module("rlg")
    use(finder, rlg="import builtins\nbuiltins.interrupting()\nvalue = 2")
    monkeypatch.setattr("builtins.interrupting", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        reload_changed({})
    assert rlg.value == 1
    monkeypatch.setattr("builtins.interrupting", lambda: None)
    assert reload_changed({}) == ()
    assert rlg.value == 2


def test_methods_may_use_super_after_an_edit(finder: OwnFinder) -> None:
    text = "class A:\n    def f(self): return 1\nclass B(A):\n    def f(self): return 2\n"
    use(finder, rlh=text)
    rlh = importlib.import_module("rlh")
    own_class = type("Own", (rlh.B,), {})
    use(finder, rlh=text.replace("return 2", "return super().f() + 10"))
    reload_changed({})
    assert own_class().f() == rlh.B().f() == 11
