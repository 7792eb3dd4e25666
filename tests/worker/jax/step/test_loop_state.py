"""State of a training loop: saved by name and path, restored, and free of a device."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nbdist.errors import StepError
from nbdist.worker.jax.step.loop_state import LoopState, Snapshot

CLASS = """
class Trainer:
    def __init__(self, weights, model):
        self.weights, self.model, self.steps, self.name = weights, model, 3, "trainer"
"""


@pytest.fixture
def trainer_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a class of the user: its module is `__main__`."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(CLASS, vars(main))
    return vars(main)["Trainer"]


def state_of(trainer_class: Any, seed: int) -> tuple[LoopState, dict[str, Any]]:
    """Return a state, and its names: pytrees, functional state of NNX, NNX objects, an object."""
    net = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(seed + 1)))
    transformation = optax.adam(0.1)
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(seed + 2))
    carried = {
        "params": params,
        "opt_state": transformation.init(params),
        "count": seed,
        "key": jax.random.key(seed),
        "rate": 0.5 * seed,
        "text": "constant",
    }
    read = {
        "net": net,
        "trainer": trainer_class(jnp.full(2, float(seed)), model),
        "graphdef": graphdef,
        "transformation": transformation,
        "data": np.arange(4.0),
    }
    return LoopState(carried, read), {**carried, **read}


def test_arrays_and_numbers_are_saved_by_name_and_path(trainer_class: Any) -> None:
    state, _ = state_of(trainer_class, 1)
    saved = state.saved()
    assert {path.split("[")[0].split(".")[0] for path in saved} == {
        *("params", "opt_state", "count", "key", "rate", "net", "trainer"),
    }
    assert saved["count"] == 1
    assert saved["trainer.steps"] == 3
    assert saved["trainer.weights"].shape == (2,)
    assert state.names == ("params", "opt_state", "count", "key", "rate", "text", "net", "trainer")


def test_another_state_takes_the_saved_values(trainer_class: Any) -> None:
    state, _ = state_of(trainer_class, 1)
    arrays = {
        path: np.asarray(jax.random.key_data(leaf) if path == "key" else leaf)
        for path, leaf in state.saved().items()
    }
    other, names = state_of(trainer_class, 5)
    names["trainer"].steps = 8
    other.take(arrays)
    assert other.is_changed
    for path, leaf in other.saved().items():
        value = np.asarray(jax.random.key_data(leaf) if path == "key" else leaf)
        np.testing.assert_array_equal(value, arrays[path], err_msg=path)
    count, key, rate, text = other.changed()[2:]
    assert (count, type(count), rate, text) == (1, int, 0.5, "constant")
    assert jax.random.key_impl(key) == jax.random.key_impl(jax.random.key(0))
    assert names["trainer"].steps == 3
    np.testing.assert_array_equal(names["net"].kernel[...], arrays["net['kernel'].value"])


def test_values_of_another_shape_are_refused(trainer_class: Any) -> None:
    state, _ = state_of(trainer_class, 1)
    arrays = {path: np.asarray(leaf) for path, leaf in state.saved().items() if path != "key"}
    arrays["key"] = np.asarray(jax.random.key_data(jax.random.key(0)))
    arrays["net['kernel'].value"] = np.zeros((3, 3), np.float32)
    with pytest.raises(StepError, match=r"net\['kernel'\]\.value has shape \(3, 3\)"):
        state.take(arrays)


def test_arrays_on_one_device_are_free_to_move(trainer_class: Any) -> None:
    state, names = state_of(trainer_class, 1)
    (device, *_) = jax.local_devices()
    names["net"].kernel[...] = jax.device_put(names["net"].kernel[...], device)
    state.carried["params"] = jax.device_put(state.carried["params"], device)
    assert jax.tree.leaves(state.carried["params"])[0].committed
    state.adopt()
    assert not any(leaf.committed for leaf in jax.tree.leaves(state.carried["params"]))
    assert not names["net"].kernel[...].committed


def test_snapshot_restores_the_state_and_the_generators(trainer_class: Any) -> None:
    state, names = state_of(trainer_class, 1)
    own = np.random.default_rng(3)
    np.random.seed(3)
    before = Snapshot(state, {"own": own})
    kernel = np.asarray(names["net"].kernel[...])
    first = own.normal(), np.random.normal()
    names["net"].kernel[...] = jnp.zeros((2, 3))
    names["trainer"].steps = 9
    before.restore()
    assert (own.normal(), np.random.normal()) == first
    np.testing.assert_array_equal(names["net"].kernel[...], kernel)
    assert names["trainer"].steps == 3


def test_dicts_and_lists_keep_their_identity() -> None:
    """The arrays of a checkpoint come into the user's own containers."""
    tree = {"a": {"w": jnp.ones(2)}, "b": [np.ones(3), (jnp.zeros(1), 0.5)], "name": "x"}
    inner, items = tree["a"], tree["b"]
    state = LoopState({}, {"tree": tree, "other": {"w": jnp.ones(2)}}, ("tree",))
    assert state.names == ("tree",)
    saved = {path: np.asarray(leaf) + 1 for path, leaf in state.saved().items()}
    state.take(saved)
    assert tree["a"] is inner
    assert tree["b"] is items
    assert inner["w"].tolist() == [2, 2]
    assert items[0].tolist() == [2, 2, 2]
    assert (items[1][0].tolist(), items[1][1], tree["name"]) == ([1], 1.5, "x")


def test_array_of_numpy_keeps_its_identity() -> None:
    array = np.zeros(3)
    state = LoopState({}, {"w": array}, ("w",))
    state.take({"w": np.arange(3.0)})
    assert array.tolist() == [0, 1, 2]


def test_number_that_has_become_an_array_is_restored_as_one() -> None:
    state = LoopState({"v": 0, "b": 0.0, "count": 3}, {})
    arrays = {"v": np.full((2, 1), 0.5, "float32"), "b": np.float32(0.25), "count": np.asarray(7)}
    state.take({path: np.asarray(array) for path, array in arrays.items()})
    v, b, count = state.changed()
    assert v.tolist() == [[0.5], [0.5]]
    assert (b.dtype, float(b)) == (jnp.float32, 0.25)
    assert (count, type(count)) == (7, int)


def test_items_that_steps_appended_to_lists_are_left_out(trainer_class: Any) -> None:
    trainer = trainer_class(jnp.zeros(2), None)
    trainer.losses = [0.5]
    state = LoopState({}, {"trainer": trainer})
    first = {path: np.asarray(leaf) for path, leaf in state.saved().items()}
    state.take(first | {"trainer.losses[1]": np.asarray(0.25)})
    assert trainer.losses == [0.5]
    with pytest.raises(StepError, match=r"not used by the cell: trainer\.extra"):
        state.take(first | {"trainer.extra": np.asarray(0.25)})


def test_snapshot_restores_arrays_that_change_in_place() -> None:
    array, fixed, tree = np.zeros(2), np.ones(2), {"w": np.zeros(3)}
    fixed.setflags(write=False)
    state = LoopState({"array": array, "fixed": fixed}, {"tree": tree}, ("tree",))
    before = Snapshot(state, {})
    array += 1
    tree["w"] -= 1
    before.restore()
    assert array.tolist() == [0, 0]
    assert tree["w"].tolist() == [0, 0, 0]
    assert state.carried["array"] is array
