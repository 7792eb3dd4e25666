"""Modules of the user: the notebook, and files outside of packages."""

from __future__ import annotations

import sys
from collections import deque
from types import ModuleType

import pytest

from nbdist.worker.runtime import user_modules


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("own_helpers")
    made.__file__ = "/home/user/own_helpers.py"
    monkeypatch.setitem(sys.modules, "own_helpers", made)
    code = "def step(): pass\nclass Trainer: pass"
    exec(compile(code, made.__file__, "exec"), vars(made))
    return made


def test_objects_of_the_user(module: ModuleType) -> None:
    for value in (module, vars(module)["step"], vars(module)["Trainer"], module.Trainer()):
        assert user_modules.is_of_user(value)
    for value in (sys, deque, deque(), len, 3):
        assert not user_modules.is_of_user(value)


def test_modules_behind_values_include_those_that_they_use(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("own_other")
    other.__file__ = "/home/user/own_other.py"
    monkeypatch.setitem(sys.modules, "own_other", other)
    vars(module)["other"] = other
    assert list(user_modules.behind([3, len, vars(module)["step"]])) == [module, other]
    assert list(user_modules.behind([module.Trainer()])) == [module, other]
    assert not list(user_modules.behind([sys, deque()]))
