"""Mutable objects of a program and their slots."""

from __future__ import annotations

import functools
import math
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from types import CellType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.jax.step.object_slots import (
    Attributes,
    Globals,
    container_of,
    is_data,
    is_open,
    leads_on,
)
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator


class Plain:
    """Object with a `__dict__`."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Base:
    """Object with slots alone."""

    __slots__ = ("a", "unset")


class Derived(Base):
    """Object with inherited slots and a `__dict__`."""

    def __init__(self) -> None:
        self.a = 1
        self.b = 2

    @property
    def computed(self) -> int:
        raise AssertionError("a property is no slot")


class Alien:
    """Object that pretends to be a dict."""

    __class__ = dict  # type: ignore[assignment]


@pytest.fixture
def users_module() -> Iterator[ModuleType]:
    """Create a module of the user outside of any package."""
    module = ModuleType("own_module")
    module.__file__ = "/home/user/own_module.py"
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("value", "slots", "words"),
    [
        ({"a": 1, 2: 3}, {"a": 1, 2: 3}, ["['a']", "[2]"]),
        (defaultdict(int, a=1), {"a": 1}, ["['a']"]),
        ([5, 6], {0: 5, 1: 6}, ["[0]", "[1]"]),
        (deque([5]), {0: 5}, ["[0]"]),
        (Plain(x=1), {"x": 1}, [".x"]),
        (Derived(), {"a": 1, "b": 2}, [".b", ".a"]),
        (CellType(7), {"": 7}, [""]),
        (CellType(), {}, []),
        (SimpleNamespace(y=2), {"y": 2}, [".y"]),
    ],
)
def test_slots_of_containers(value: Any, slots: dict[Any, Any], words: list[str]) -> None:
    container = container_of(value)
    assert container is not None
    assert container.value is value
    assert container.contents() == slots
    assert [container.word(key) for key in container.contents()] == words


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": 1}, "a"),
        (OrderedDict(a=1), "a"),
        ([5, 6], 1),
        (deque([5, 6]), 0),
        (Plain(x=1), "x"),
        (Derived(), "a"),
        (Derived(), "b"),
        (CellType(7), ""),
    ],
)
def test_slots_can_be_changed_and_removed(value: Any, key: Any) -> None:
    container = container_of(value)
    assert container is not None
    container.put(key, "new")
    assert container.contents()[key] == "new"
    before = len(container.contents())
    container.remove(key)
    assert len(container.contents()) == before - 1


@pytest.mark.parametrize(("value", "key"), [({}, "a"), ([], 0), (deque([1]), 1), (Base(), "a")])
def test_new_slots_are_added(value: Any, key: Any) -> None:
    container = container_of(value)
    assert container is not None
    container.put(key, 3)
    assert container.contents()[key] == 3


def test_overridden_methods_of_a_container_are_not_called() -> None:
    class Odd(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError

        __delitem__ = copy = __setitem__  # type: ignore[assignment]

    value = Odd(a=1)
    container = container_of(value)
    assert container is not None
    container.put("b", 2)
    container.remove("a")
    assert container.contents() == {"b": 2}


def test_order_of_an_ordered_dict_stays_consistent() -> None:
    value = OrderedDict(a=1)
    container = container_of(value)
    assert container is not None
    container.put("b", 2)
    assert list(value) == ["a", "b"]


def test_globals_are_the_names_of_the_user() -> None:
    names = {"w": 1, "_hidden": 2, "In": 3, "mesh": 4, "strategy": 5}
    notebook, module = Globals(names, ""), Globals(names, "tools")
    assert notebook.contents() == module.contents() == {"w": 1}
    assert (notebook.word("w"), module.word("w")) == ("w", "tools.w")


def test_class_attributes_are_slots_of_the_users_classes(users_module: ModuleType) -> None:
    users = type("Model", (), {"scale": 1, "__module__": users_module.__name__})
    container = container_of(users)
    assert container is not None
    assert container.contents() == {"scale": 1}
    container.put("scale", 2)
    assert users.scale == 2  # type: ignore[attr-defined]
    container.remove("scale")
    assert container.contents() == {}
    assert container_of(math.__class__) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, True),
        ("a", True),
        (None, True),
        (True, True),
        (np.ones(2), True),
        ((1, (2.5, "a")), True),
        ((1, [2]), False),
        ([1], False),
        ({}, False),
        (np.float32(1), False),
        (jnp.ones(2), False),
    ],
)
def test_data_contain_no_objects(value: Any, expected: bool) -> None:
    assert is_data(value) is expected


@pytest.mark.parametrize(
    "value", [1, "a", np.ones(2), np.float32(1), jnp.ones(2), math, len, (1, 2), ..., iter("")]
)
def test_values_without_containers(value: Any) -> None:
    assert leads_on(value) is (type(value) is type(iter("")))


@pytest.mark.parametrize(
    "value", [[], {}, (1, []), Plain(), lambda: 0, functools.partial(print), Plain]
)
def test_values_that_may_lead_to_containers(value: Any) -> None:
    assert leads_on(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Plain(), True),
        (Derived(), True),
        (SimpleNamespace(), True),
        (UserDict(), True),
        (object(), False),
        ((1, 2), False),
        ({}, False),
        ([], False),
        (Plain, False),
        (lambda: 0, False),
        (Plain().__init__, False),
        (functools.partial(print), False),
        (type("Rows", (tuple,), {})(), False),
        (type("Call", (functools.partial,), {})(print), False),
        (np.random.default_rng(0), False),
        (pytest, False),
    ],
)
def test_objects_with_attributes_are_open(value: Any, expected: bool) -> None:
    assert is_open(value) is expected


def test_type_of_an_object_counts_not_its_pretended_class() -> None:
    alien = Alien()
    assert isinstance(alien, dict)
    assert isinstance(container_of(alien), Attributes)


def test_modules_of_the_user_are_outside_of_packages(users_module: ModuleType) -> None:
    assert is_users("__main__")
    assert is_users(users_module.__name__)
    del users_module.__file__
    assert not is_users(users_module.__name__)
    for module in (None, "math", "json", "numpy.linalg", "nbdist", "pytest", "missing_module"):
        assert not is_users(module)
