"""Traversal of the objects of a program: each once, with its shortest path."""

from __future__ import annotations

import dataclasses
import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import pytest

from nbdist.worker.jax.step.object_graph import walk

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "own_module"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """Create a module of the user that programs of these tests may import."""
    made = ModuleType(MODULE)
    made.__file__ = f"/home/user/{MODULE}.py"
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def program(source: str) -> dict[str, Any]:
    """Return the namespace of a program in a notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), namespace)
    return namespace


def found(namespace: dict[str, Any], *names: str, apart: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the origin of each container by its path."""
    users, *others = walk(names, namespace, apart)
    assert users.container.value is namespace
    assert len({id(one.container.value) for one in others}) == len(others)
    return {one.path: one.origin for one in others}


def test_containers_of_the_steps_names_come_first() -> None:
    namespace = program("other = [1]\nown = {'a': [2]}\nnumber = 3")
    assert list(found(namespace, "own").items()) == [
        ("own", "own"),
        ("own['a']", "own"),
        ("other", None),
    ]


@pytest.mark.parametrize("names", [("deep", "short"), ("short", "deep")])
def test_shared_object_has_its_shortest_path(names: tuple[str, ...]) -> None:
    namespace = program("inner = [1]\ndeep = {'x': {'y': inner}}\nshort = [inner]")
    paths = found(namespace, *names)
    assert "short[0]" in paths
    assert "deep['x']['y']" not in paths


def test_cycles_end() -> None:
    namespace = program("a = []\nb = {'a': a}\na.append(b)")
    assert found(namespace, "a") == {"a": "a", "a[0]": "a"}


def test_values_apart_are_skipped() -> None:
    namespace = program("data = [[1]]\nw = {}")
    assert found(namespace, "w", apart=(namespace["data"],)) == {"w": "w"}


def test_function_leads_to_its_variables_and_globals() -> None:
    namespace = program(
        "log = []\nseen = {}\n"
        "def outer():\n"
        "    count = {0: 'in a variable'}\n"
        "    def step(x, start={0: 'in a default'}, *, more={0: 'in a keyword'}):\n"
        "        log.append(count)\n"
        "    return step\n"
        "step = outer()\nstep.extra = {0: 'in an attribute'}\n"
    )
    origins = {str(one.container.value): one.origin for one in walk(["step"], namespace)}
    for place in ("a variable", "a default", "a keyword", "an attribute"):
        assert origins[f"{{0: 'in {place}'}}"] == "step"
    assert (origins["[]"], origins["{}"]) == ("step", None)
    assert {"step.count", "step.extra", "step", "log"} <= found(namespace, "step").keys()


def test_root_is_the_name_of_the_namespace() -> None:
    namespace = program("log = []\nown = {'a': [1]}\ndef f():\n    log.append(1)")
    roots = {one.path: (one.root, one.origin) for one in walk(["f", "own"], namespace)}
    assert roots["log"] == ("log", "f")
    assert roots["own['a']"] == ("own", "own")


def test_function_of_another_module_leads_to_that_modules_globals(module: ModuleType) -> None:
    source = "cache = {}\nunused = []\ndef f():\n    cache[1] = 2\n"
    exec(source, vars(module))
    namespace = {"f": module.f}
    ends = [(one.path, one.root, one.origin) for one in walk(["f"], namespace)]
    assert ("", "f", "f") in ends[1:]
    assert (f"{MODULE}.cache", "f", "f") in ends
    assert f"{MODULE}.unused" not in [path for path, _, _ in ends]


def test_function_of_a_library_is_not_followed() -> None:
    assert found({"f": functools.lru_cache(dataclasses.fields)}, "f") == {}


CALLED = "log = []\nclass Model:\n    kept = []\n    def call(self):\n        log.append(1)\n"


@pytest.mark.parametrize(
    "bound",
    [
        "step = Model().call",
        "import functools\nstep = functools.partial(Model.call, None)",
        "import functools\nstep = functools.partial(print, key=Model.call)",
        "step = (1, Model.call)",
        "step = [staticmethod(Model.call)]",
        "step = {'p': property(Model.call)}",
        "import functools\nstep = functools.lru_cache(Model.call)",
    ],
)
def test_callables_lead_to_their_functions(bound: str) -> None:
    namespace = program(f"{CALLED}{bound}\n")
    assert found(namespace, "step")["log"] == "step"


def test_bound_method_leads_to_its_object() -> None:
    namespace = program(f"{CALLED}model = Model()\nmodel.items = []\nstep = model.call\ndel model")
    assert found(namespace, "step")["step.items"] == "step"


def test_object_leads_to_the_attributes_of_its_class() -> None:
    paths = found(program(f"{CALLED}model = Model()\ndel Model"), "model")
    assert paths["Model.kept"] == "model"
    assert paths["log"] == "model"


def test_pytree_of_a_library_leads_to_its_children() -> None:
    inner: list[int] = []
    node = jax.tree_util.Partial(len, inner, key={"a": []})
    assert found({"node": node}, "node").keys() >= {"node.key"}
