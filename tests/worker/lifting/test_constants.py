"""Values behind the functions of a step, found and read again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbdist.worker.lifting.constants import Constants, is_same


def constants(cell: str, names: tuple[str, ...], step: str) -> tuple[dict[str, Any], Constants]:
    """Run a cell of the user, and find the constants of a step that reads some of its names."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, space)
    code = compile(step, "step", "exec")
    return space, Constants(code, {name: space[name] for name in names})


FUNCTIONS = """
beta, other = 0.5, 1
settings = {"gamma": 2, "unread": 3}
def loss(x):
    return beta * x + settings["gamma"]
def train_step(x):
    return loss(x)
def made():
    scale = 1
    def inner(x):
        return scale * x
    def grow():
        nonlocal scale
        scale += 1
    return inner, grow
closed, grow = made()
"""


def test_globals_items_and_closures_of_called_functions_are_read_again() -> None:
    space, found = constants(FUNCTIONS, ("train_step", "closed"), "train_step(closed(x))")
    values = {path.rpartition(":")[2]: value for path, value in found().items()}
    assert values["beta"] == 0.5
    assert values["scale"] == 1
    assert any(path.endswith("settings['gamma']") for path in found())
    assert not {"other", "settings['unread']"} & values.keys()
    before = found()
    space["beta"] = 0.7
    space["settings"]["gamma"] = 9
    space["grow"]()
    changed = {path: value for path, value in found().items() if value != before[path]}
    assert sorted(changed.values()) == [0.7, 2, 9]


def test_arrays_and_lists_changed_in_place_are_found() -> None:
    space: dict[str, Any] = {"small": np.zeros(4), "large": np.zeros((1 << 13, 4)), "items": [1.0]}
    code = compile("step(small, large, items)", "step", "exec")
    found = Constants(code, space)
    for name in ("small", "items", "large"):
        before = found()
        space[name][0] = 7.0
        assert found(begins=False) != before
    before = found()
    space["large"][0, 1] = 3.0
    assert found(begins=False) == before, "a step compares a sample of large arrays"
    assert found() != before
    small = Constants(code, {"small": space["small"]})
    before = small()
    space["small"][1] = 3.0
    assert small(begins=False) != before


def test_equal_plain_values_are_the_same() -> None:
    assert is_same(bytes([1, 0]), bytes([1, 0]))
    assert is_same((1.5, "a"), (1.5, "a"))
    assert not is_same((1.5,), (1.5, 2))
    assert not is_same(1, True)
    assert not is_same([1], [1])


TRAINER = """
class Trainer:
    scale = 2.0
    def __init__(self):
        self.weight, self.seen = 0.0, 0
    def penalty(self, x):
        return self.weight * self.scale * x
    def step(self, x):
        return self.penalty(x)
    def fit(self):
        self.seen += 1
trainer = Trainer()
"""


@pytest.mark.parametrize("step", ["trainer.step(x)", "step(x)"])
def test_attributes_that_called_methods_read_are_found(step: str) -> None:
    cell = TRAINER + "step = trainer.step\n"
    space, found = constants(cell, (step.split("(")[0].split(".")[0],), step)
    assert 0.0 in found().values()
    assert not any("seen" in path for path in found())
    space["trainer"].weight = 3.0
    space["trainer"].scale = 4.0
    assert {3.0, 4.0} <= set(found().values())
