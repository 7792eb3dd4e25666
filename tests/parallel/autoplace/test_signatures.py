"""Arguments of calls: static values, traced leaves, kinds of leaves, and refusals."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.parallel.autoplace.signatures import KINDS, Statics, UnsupportedLeaf, refusal


def test_call_without_statics_has_only_leaves() -> None:
    given = Statics((), ()).given((1, {"b": 2, "a": 3}), {"z": 4, "y": 5})
    assert given.leaves == [1, 3, 2, 5, 4]
    assert given.statics == ()
    assert given.arguments == [0, 1, 1, 2, 3]
    assert given.with_leaves("abcde") == (["a", {"b": "c", "a": "b"}], {"z": "e", "y": "d"})


def test_statics_are_no_leaves_and_return_to_their_places() -> None:
    given = Statics((1, 3), ("mode", "depth")).given(
        (10, "tanh", 20, (1, 2)), {"x": 30, "mode": "train", "depth": 2}
    )
    assert given.leaves == [10, 20, 30]
    assert given.statics == ((1, "tanh"), (3, (1, 2)), ("depth", 2), ("mode", "train"))
    assert given.with_leaves([11, 21, 31]) == (
        [11, "tanh", 21, (1, 2)],
        {"x": 31, "mode": "train", "depth": 2},
    )


def test_negative_positions_count_from_the_end() -> None:
    statics = Statics((-1,), ())
    assert statics.given((1, 2, "last"), {}).statics == ((2, "last"),)
    assert statics.given(("only",), {}).statics == ((0, "only"),)
    assert statics.given((), {}).statics == ()


def test_static_position_that_is_not_given_is_ignored() -> None:
    given = Statics((2, -3), ("mode",)).given((1, 2), {})
    assert (given.leaves, given.statics) == ([1, 2], ())
    by_name = Statics((1,), ()).given((1,), {"mode": 5})
    assert (by_name.leaves, by_name.statics) == ([1, 5], ())


def test_equal_calls_have_equal_signatures() -> None:
    statics = Statics((1,), ())
    one, other = (statics.given((1, mode), {"x": 3}) for mode in ("train", "test"))
    assert one.tree == other.tree
    assert one.statics != other.statics


@pytest.mark.parametrize(
    ("positions", "names", "place"), [((1,), (), "1"), ((), ("mode",), "'mode'")]
)
def test_static_value_must_be_hashable(
    positions: tuple[int, ...], names: tuple[str, ...], place: str
) -> None:
    message = (
        f"static argument {place} has type list, which cannot be hashed: use a tuple or another "
        "immutable value, or make it an array"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        Statics(positions, names).given((1, [2]), {"mode": [3]})


def kind(leaf: Any) -> Any:
    return KINDS[type(leaf)](leaf)


def test_kind_is_shape_type_and_place() -> None:
    first, second = jax.devices()[:2]
    x = jax.device_put(np.ones((2, 3), np.float32), first)
    assert kind(x) == kind(jax.device_put(np.zeros((2, 3), np.float32), first))
    others = (
        jax.device_put(np.ones((3, 2), np.float32), first),
        jax.device_put(np.ones((2, 3), np.int32), first),
        jax.device_put(np.ones((2, 3), np.float32), second),
        jnp.ones((2, 3), np.float32),  # not committed to its device
    )
    assert all(kind(other) != kind(x) for other in others)
    assert kind(jax.random.key(0)) == kind(jax.random.key(1))


def test_kinds_of_values_on_the_host() -> None:
    assert kind(np.ones((2, 3), np.int8)) == ((2, 3), np.dtype(np.int8))
    assert kind(np.ones((2, 3), np.int8)) == kind(np.zeros((2, 3), np.int8))
    for number in (True, 1, 0.5, 1j, np.float32(1)):
        assert kind(number) is type(number)


@pytest.mark.parametrize("value", ["text", np.array(["text"]), np.array([object()]), object()])
def test_other_leaves_have_no_kind(value: Any) -> None:
    with pytest.raises(UnsupportedLeaf):
        kind(value)


def test_deleted_and_traced_arrays_have_no_kind() -> None:
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(UnsupportedLeaf):
        kind(gone)

    def traced(x: jax.Array) -> jax.Array:
        with pytest.raises(UnsupportedLeaf):
            kind(x)
        return x

    jax.make_jaxpr(traced)(1.0)


def function(w: Any, *, mode: Any = None) -> None:
    """Take arguments by position and by name."""


def test_refusal_names_the_arguments() -> None:
    one = refusal(function, ["text"], {"mode": {"a": ...}}, "work")
    assert str(one) == (
        "work accepts trees of arrays: leaf ['mode']['a'] has type ellipsis: convert it to an "
        "array, or remove it; leaf ['w'] has type str: convert it to an array, or remove it"
    )


def test_call_that_does_not_fit_is_named_by_position() -> None:
    found = refusal(function, [1, "text"], {}, "work")
    assert "leaf ['1'] has type str" in str(found)


def test_arrays_that_exist_again_were_deleted_by_another_thread() -> None:
    found = refusal(function, [np.ones(2)], {}, "work")
    assert str(found) == (
        "another thread deleted arrays that work received: call it with existing arrays"
    )
