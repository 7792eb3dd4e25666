"""Traversal of a user's value that replaces its arrays."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.jax.rebuild.walk import LostValue, Walk

OLD = jnp.ones(2)
NEW = jnp.zeros(2)


class Pair(NamedTuple):
    """Pytree that is rebuilt."""

    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    """Dataclass that JAX does not know."""

    weights: Any
    name: str = "a"


class Own:
    """Class of the notebook."""

    __module__ = "__main__"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Library:
    """Class of an installed package."""

    __module__ = np.__name__

    def __init__(self, weights: Any) -> None:
        self.weights = weights


class Slotted:
    """Class of the notebook without a `__dict__`."""

    __module__ = "__main__"
    __slots__ = ()


def replace(leaf: Any) -> Any:
    return NEW if leaf is OLD else leaf


def walk(value: Any, *renewers: Any) -> Any:
    return Walk(replace, renewers)(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": OLD},
        lambda: OrderedDict(a=OLD),
        lambda: defaultdict(list, a=OLD),
        lambda: {"a": {"b": [OLD]}},
        lambda: Record(OLD),
        lambda: Own(weights=OLD, more=[OLD]),
        lambda: [OLD, 1, [OLD]],
    ],
)
def test_containers_change_in_place(make: Any) -> None:
    value = make()
    assert walk(value) is value
    leaves: list[Any] = []
    collect = Walk(lambda leaf: leaves.append(leaf) or leaf, ())
    collect(value)
    assert leaves
    assert all(leaf is NEW for leaf in leaves)


def test_pytrees_are_rebuilt_if_a_part_changes() -> None:
    changed = Pair(OLD, (1, OLD))
    found = walk(changed)
    assert found is not changed
    assert isinstance(found, Pair)
    assert found.first is found.second[1] is NEW
    assert found.second[0] == 1


def test_pytrees_without_a_change_stay_the_same_object() -> None:
    same = Pair(NEW, ({"a": 1}, np.ones(2)))
    assert walk(same) is same


def test_pytree_with_a_container_that_changes_stays_the_same_object() -> None:
    inner = {"a": OLD}
    value = (inner, 1)
    assert walk(value) is value
    assert inner["a"] is NEW


def test_shared_values_stay_shared_and_are_replaced_once() -> None:
    seen: list[Any] = []

    def count(leaf: Any) -> Any:
        seen.append(leaf)
        return NEW

    pair = (OLD,)
    found = Walk(count, ())([pair, pair, OLD])
    assert found[0] is found[1]
    assert found[0][0] is found[2] is NEW
    assert len(seen) == 1


def test_cycles_end() -> None:
    value: dict[str, Any] = {"a": OLD}
    value["self"] = value
    walk(value)
    assert value["a"] is NEW
    assert value["self"] is value


@pytest.mark.parametrize(
    "value",
    [Library(OLD), lambda: OLD, "text", np.ones(2), Library, UserDict(a=OLD), Slotted(), None],
)
def test_other_objects_are_left_alone(value: Any) -> None:
    assert walk(value) is value
    assert getattr(value, "weights", OLD) is OLD


def test_renewers_take_objects_of_their_library() -> None:
    def renew(value: Any, walk: Walk) -> bool:
        if isinstance(value, Library):
            walk.items(vars(value))
        return isinstance(value, Library)

    value = Library(OLD)
    assert walk([value], lambda *_: False, renew) == [value]
    assert value.weights is NEW


def test_devices_meshes_and_shardings_are_leaves() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P())
    value = [jax.devices()[0], mesh, sharding]
    leaves: list[Any] = []
    Walk(lambda leaf: leaves.append(leaf) or leaf, ())(value)
    assert leaves == value


def test_lost_value_ends_the_walk_and_can_be_tried_again() -> None:
    is_lost = [True]

    def lose(leaf: Any) -> Any:
        if is_lost[0]:
            raise LostValue
        return NEW

    trial, value = Walk(lose, ()), {"a": OLD}
    with pytest.raises(LostValue):
        trial(value)
    is_lost[0] = False
    assert trial(value)["a"] is NEW
