"""Leaves of a tree: their paths and bytes, and the faults of values that cannot be placed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.parallel.placement.leaves import GONE, fault_of, leaves_of

INT32 = np.iinfo(np.int32)
WIDE = (
    "JAX's integers have 32 bits: take smaller ones, or "
    'jax.config.update("jax_enable_x64", True) before anything is made'
)


def test_leaves_have_paths_shapes_and_bytes() -> None:
    tree = {"w": [np.ones((2, 3), np.float16), jnp.ones(4)], "rate": 0.5}
    leaves, structure = leaves_of(tree, "place")
    assert [(leaf.path, leaf.shape, leaf.nbytes) for leaf in leaves] == [
        ("['rate']", (), 8),
        ("['w'][0]", (2, 3), 12),
        ("['w'][1]", (4,), 16),
    ]
    assert [leaf.name for leaf in leaves][:2] == ["['rate'] []", "['w'][0] [2, 3]"]
    assert structure == jax.tree.structure(tree)


def test_single_array_has_no_path() -> None:
    ((leaf,), _) = leaves_of(np.ones(3), "place")
    assert (leaf.path, leaf.name) == ("", "the array [3]")
    assert leaves_of({}, "place")[0] == []


def deleted() -> jax.Array:
    array = jnp.ones((2, 2))
    array.delete()
    return array


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        0.5,
        1j,
        np.float64(1),
        INT32.max,
        INT32.min,
        np.array([INT32.min, INT32.max]),
        np.array([], np.int64),
        np.array([2**32 - 1], np.uint64),
        np.array([2**40], np.float64),
        np.array([True]),
        jnp.ones(2),
        jax.random.key(0),
    ],
    ids=repr,
)
def test_numbers_and_arrays_can_be_placed(value: Any) -> None:
    assert fault_of(value) == ""


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("text", "has type str: convert it to an array, or remove it"),
        (object, "has type type: convert it to an array, or remove it"),
        (INT32.max + 1, f"is {INT32.max + 1}, and {WIDE}"),
        (INT32.min - 1, f"is {INT32.min - 1}, and {WIDE}"),
        (
            np.array([3, INT32.max + 1]),
            f"has numbers from 3 to {INT32.max + 1}, and {WIDE}",
        ),
        (np.array([INT32.min - 1, 0]), f"has numbers from {INT32.min - 1} to 0, and {WIDE}"),
        (np.int64(2**40), f"has numbers from {2**40} to {2**40}, and {WIDE}"),
        (np.array([2**32], np.uint64), f"has numbers from {2**32} to {2**32}, and {WIDE}"),
        (
            np.array(["a"]),
            "is of <U1, which JAX does not support: convert it to numbers, such as float32",
        ),
        (
            np.zeros(1, [("a", "f4")]),
            (
                "is of [('a', '<f4')], which JAX does not support: convert it to numbers, "
                "such as float32"
            ),
        ),
        (
            np.ones(1, np.longdouble),
            "is of float128, which JAX does not support: convert it to numbers, such as float32",
        ),
        (
            np.array(["2026-01-01"], "M8[D]"),
            (
                "is of datetime64[D], which JAX does not support: convert it to numbers, "
                "such as float32"
            ),
        ),
        (
            np.ma.masked_array([1.0]),
            (
                "is masked, which JAX does not support: give .filled(...), and the mask as another "
                "array"
            ),
        ),
    ],
    ids=repr,
)
def test_fault_names_the_value_and_the_remedy(value: Any, fault: str) -> None:
    assert fault_of(value) == fault


def test_deleted_array_is_refused() -> None:
    assert fault_of(deleted()) == f"[2, 2] {GONE}"


def test_traced_array_is_refused() -> None:
    found = []

    def traced(x: jax.Array) -> jax.Array:
        found.append(fault_of(x))
        return x

    jax.make_jaxpr(traced)(jnp.ones(2))
    assert found == ["is traced (within jax.jit or jax.grad): call it outside"]


def test_every_fault_is_listed_with_its_path() -> None:
    tree = {"a": "text", "b": [np.ones(2), None, 2**40], "c": deleted()}
    message = (
        "place accepts trees of arrays: leaf ['a'] has type str: convert it to an array, or remove "
        f"it; leaf ['b'][2] is {2**40}, and {WIDE}; leaf ['c'] [2, 2] {GONE}"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        leaves_of(tree, "place")
    with pytest.raises(UsageError, match=r"^where accepts trees of arrays: it has type str"):
        leaves_of("text", "where")


def test_64_bits_keep_large_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        assert fault_of(2**40) == ""
        assert fault_of(np.array([2**40])) == ""
