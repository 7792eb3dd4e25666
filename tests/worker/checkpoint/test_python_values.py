"""Values of Python survive a checkpoint, and containers keep their identity."""

from __future__ import annotations

import collections
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from nbdist.worker.checkpoint import python_values
from nbdist.worker.checkpoint.python_values import Decoder, UnsavableError, decode, encode


def restored(value: Any, now: Any = None) -> Any:
    """Return a value after the way through a file."""
    return decode(msgspec.msgpack.decode(msgspec.msgpack.encode(encode(value))), now)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**100,
        1.5,
        "loss",
        b"\x00",
        [1.0, 2.5],
        [1, [2.0, "a"], None],
        (1, (2, [3])),
        {"loss": [0.5], 3: (1,)},
        {1, 2},
        frozenset({"a"}),
        collections.deque([1, 2]),
        np.float32(2.5),
        np.int64(7),
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    found = restored(value)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "U3", "datetime64[s]"])
def test_arrays(dtype: str) -> None:
    value = np.zeros((2, 3), dtype)
    found = restored(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_arrays_of_jax() -> None:
    jax = pytest.importorskip("jax")
    for value in (jax.numpy.arange(3.0), jax.numpy.ones(2, jax.numpy.bfloat16)):
        found = restored(value)
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.tolist()) == (value.dtype, value.tolist())
    key = jax.random.key(4)
    assert jax.random.uniform(restored(key)) == jax.random.uniform(key)


def test_trees_of_registered_types() -> None:
    flax = pytest.importorskip("flax.struct")
    jax = pytest.importorskip("jax")

    class State(flax.PyTreeNode):
        step: int
        params: dict[str, Any]
        apply: Any = flax.field(pytree_node=False)

    now = State(0, {"w": jax.numpy.zeros(2)}, abs)
    saved = encode(State(3, {"w": jax.numpy.ones(2)}, abs))
    decoder = Decoder({}, {}, [1, now])
    for found in (decode(saved, now), decoder.decode("best", saved, None)):
        assert (type(found), found.step, found.apply) == (State, 3, abs)
        assert found.params["w"].tolist() == [1.0, 1.0]
    assert now.step == 0


def test_names_of_one_object_share_it_again() -> None:
    """The object of `a` is kept, and `b` refers to it again. `c` and `d` receive a new one."""
    group = [frozenset({"a", "b"}), frozenset({"c", "d"})]
    now = {"a": [1], "b": [2], "c": [3], "d": [4]}
    decoder = Decoder({path: one for one in group for path in one}, {"a": now["a"]})
    saved = encode([5])
    found = {path: decoder.decode(path, saved, now[path]) for path in ("b", "a", "d", "c")}
    assert found["b"] is found["a"] is now["a"]
    assert found["c"] is found["d"]
    assert found["c"] not in (now["c"], now["d"])
    assert set(map(tuple, found.values())) == {(5,)}


def test_containers_are_restored_in_place() -> None:
    losses: list[float] = [1.0]
    history = collections.defaultdict(list, {"loss": losses})
    recent = collections.deque([1, 2], 2)
    seen, table = {1}, np.arange(3)
    saved = encode(({"loss": [1.0]}, [1, 2], {1}, np.arange(3)))
    losses.append(2.0)
    history["accuracy"].append(0.5)
    recent.append(3)
    seen.add(2)
    table[0] = 9
    for part, now in zip(saved["tuple"], (history, list(recent), seen, table), strict=True):
        assert decode(part, now) is now
    assert history == {"loss": [1.0]}
    assert history["loss"] is losses
    assert seen == {1}
    assert table.tolist() == [0, 1, 2]
    assert decode(encode(collections.deque([1, 2])), recent) is recent
    assert (recent.maxlen, list(recent)) == (2, [1, 2])


def test_named_tuples_keep_their_type() -> None:
    kind = collections.namedtuple("State", ["count", "moments"])
    saved, now = encode(kind(3, [kind(1.0, None)])), kind(5, [kind(2.0, None)])
    found = decode(saved, now)
    assert (type(found), found) == (kind, kind(3, [kind(1.0, None)]))
    assert type(found.moments[0]) is kind


@pytest.mark.parametrize(
    "generator",
    [
        np.random.default_rng(1),
        np.random.Generator(np.random.Philox(2)),
        np.random.Generator(np.random.MT19937(2)),
        np.random.RandomState(3),
        random.Random(4),
    ],
    ids=lambda generator: type(getattr(generator, "bit_generator", generator)).__name__,
)
def test_generators_continue_from_their_state(generator: Any) -> None:
    saved = encode(generator)
    expected = [generator.random() for _ in range(3)]
    assert decode(saved, generator) is generator
    assert [generator.random() for _ in range(3)] == expected
    new = decode(saved)
    assert type(new) is type(generator)
    assert [new.random() for _ in range(3)] == expected


def test_generator_of_nnx_continues_in_place() -> None:
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(3, noise=4)
    rngs()
    variables = {"rngs": rngs, "also": [rngs]}
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(encode(rngs)))
    expected = [np.asarray(rngs.noise.uniform(())), np.asarray(rngs.default.uniform(()))]
    assert decode(saved, rngs) is rngs
    assert [np.asarray(rngs.noise.uniform(())), np.asarray(rngs.default.uniform(()))] == expected
    paths = python_values.shared_paths(python_values.mutable_objects(variables))
    assert paths == [["rngs", "also[0]"]]


def test_generator_with_another_stream_keeps_its_state() -> None:
    nnx = pytest.importorskip("flax.nnx")
    before, now, same = nnx.Rngs(3), nnx.Rngs(5, noise=4), nnx.Rngs(5, noise=4)
    decoder = Decoder({}, {"rngs": now})
    assert decoder.decode("rngs", encode(before), now) is now
    assert decoder.unlike == ["rngs"]
    assert now.noise.uniform(()) == same.noise.uniform(())
    assert now.default.uniform(()) == same.default.uniform(())


def test_generator_that_is_another_object_than_before_stays_as_it_is() -> None:
    nnx = pytest.importorskip("flax.nnx")
    now = nnx.Rngs(5)
    assert Decoder({}, {}).decode("rngs", encode(nnx.Rngs(3)), now) is now
    assert now.uniform(()) == nnx.Rngs(5).uniform(())


@pytest.mark.parametrize(
    "value",
    [object(), [object()], {"a": object()}, np.array([object()]), np.zeros(2, [("a", "f4")])],
    ids=["object", "list", "dict", "array of objects", "array with fields"],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(UnsavableError):
        encode(value)


def test_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsavableError):
        encode(value)


def test_tree_with_a_large_array_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flax = pytest.importorskip("flax.struct")
    jax = pytest.importorskip("jax")

    class State(flax.PyTreeNode):
        step: int
        w: Any

    monkeypatch.setattr(python_values, "MOST_BYTES", 1000)
    assert encode(State(1, jax.numpy.zeros(100)))
    with pytest.raises(UnsavableError):
        encode(State(1, jax.numpy.zeros(300)))


def test_large_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_values, "MOST_BYTES", 1000)
    assert encode([0.5] * 50)
    for value in (np.zeros(1001, np.uint8), "a" * 1001, [0.5] * 200, [[1]] * 20):
        with pytest.raises(UnsavableError):
            encode(value)
