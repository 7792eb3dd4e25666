"""Calls of a cell that take gradients, found by name and by the objects of the namespace."""

from __future__ import annotations

import ast
import linecache
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.cells.loops import training_loops
from nbdist.worker.lifting.callees import Callees

EARLIER = """
def update(x):
    with GradientTape() as tape:
        loss = x
    return tape.gradient(loss, [])

def outer(x):
    return update(x) + 1

def recursive(x):
    return recursive(x - 1)

def distributed(x):
    def step(x):
        with GradientTape() as tape:
            loss = x
        return tape.gradient(loss, [])
    return strategy.run(step, args=(x,))

def harmless(x):
    return x.numpy()

def epoch(data):
    for x in data:
        update(x)

def repeated(x):
    for _ in range(3):
        update(x)

class Trainer:
    def train_step(self, x):
        return update(x)

    def score(self, x):
        return x

trainer = Trainer()
"""


@pytest.fixture
def namespace() -> dict[str, Any]:
    """Return the namespace after a cell of the user, whose source is known."""
    linecache.cache["<earlier>"] = (
        len(EARLIER),
        None,
        EARLIER.splitlines(keepends=True),
        "<earlier>",
    )
    found: dict[str, Any] = {"__name__": "__main__", "bar": SimpleNamespace(train_step=abs)}
    exec(compile(EARLIER, "<earlier>", "exec"), found)
    return found


@pytest.mark.parametrize(
    ("call", "takes"),
    [
        ("update(x)", True),
        ("outer(x)", True),
        ("trainer.train_step(x)", True),
        ("self.train_step(x)", True),
        ("recursive(x)", False),
        ("distributed(x)", False),
        ("harmless(x)", False),
        ("trainer.score(x)", False),
        ("bar.train_step(x)", False),
        ("model.fit(x)", False),
        ("unknown(x)", False),
        ("functions[0](x)", False),
    ],
)
def test_calls_that_take_gradients(namespace: dict[str, Any], call: str, takes: bool) -> None:
    tree = ast.parse(call)
    (expression,) = tree.body
    assert isinstance(expression, ast.Expr)
    assert isinstance(expression.value, ast.Call)
    assert Callees(tree, namespace).takes_gradient(expression.value) == takes


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("for x in data:\n    update(x)", [1]),
        ("for e in range(3):\n    for x in data:\n        update(x)", [2]),
        ("for x in data:\n    for _ in range(2):\n        update(x)", [1]),
        ("for e in range(3):\n    for i in range(2):\n        update(x[i:])", [2]),
        ("def f():\n    while True:\n        update(1)", [2]),
        ("for x in data:\n    strategy.run(update, args=(x,))", []),
        ("for x in data:\n    distributed(x)", []),
        ("for x in data:\n    harmless(x)", []),
        ("for x in data:\n    def f():\n        update(x)", []),
        ("for e in range(3):\n    epoch(data)", []),
        ("def own(d):\n    for x in d:\n        update(x)\nfor e in range(3):\n    own(data)", [2]),
        ("for x in data:\n    repeated(x)", [1]),
        ("for x in data:\n    self.optimizer.apply(x)", [1]),
        ("for x in data:\n    model.apply(x)", []),
        ("step = tf.function(update)\nfor x in data:\n    step(x)", [2]),
        ("self.step = update\nfor x in data:\n    self.step(x)", [2]),
        ("self.step = tf.function(self.train_step)\nfor x in data:\n    self.step(x)", [2]),
        ("self.step = step\nfor x in data:\n    self.step(x)", []),
    ],
)
def test_innermost_loops_over_data_are_training_loops(
    namespace: dict[str, Any], cell: str, lines: list[int]
) -> None:
    tree = ast.parse(dedent(cell))
    found = training_loops(tree, Callees(tree, namespace))
    assert [loop.lineno for loop in found] == lines


EFFECTS = """
import functools
counted = [0]
class Trainer:
    def __init__(self):
        self.count = 0
    def train_step(self, x):
        self.count += 1
        return self.inner(x)
    def clean(self, x):
        logs = {}
        logs["x"] = x
        parts = []
        parts.append(x)
        return logs
    def inner(self, x):
        return x
    def through(self, x):
        return self.train_step(x)
def grows(x):
    losses.append(x)
def shows(x):
    print(x)
def declares(x):
    global seen
    seen = x
def fills(x, log):
    log["loss"] = x
@tf.function
def compiled(x):
    losses.append(x)
def recursive(x):
    return recursive(x)
another = tf.function(shows)
self.other = another
"""


@pytest.mark.parametrize(
    ("call", "effect"),
    [
        ("self.train_step(x)", "`self.count` in `train_step`"),
        ("self.through(x)", "`self.count` in `train_step`"),
        ("grows(x)", "`losses.append(x)` in `grows`"),
        ("shows(x)", "`print(x)` in `shows`"),
        ("declares(x)", "`global seen` in `declares`"),
        ("fills(x, log)", "`log['loss']` in `fills`"),
        ("self.clean(x)", ""),
        ("compiled(x)", ""),
        ("recursive(x)", ""),
        ("unknown(x)", ""),
        ("self.other(x)", "`print(x)` in `shows`"),
        ("another(x)", "`print(x)` in `shows`"),
    ],
)
def test_effects_that_a_compiled_step_would_lose(call: str, effect: str) -> None:
    (expression,) = ast.parse(call).body
    assert isinstance(expression, ast.Expr)
    assert isinstance(expression.value, ast.Call)
    assert Callees(ast.parse(EFFECTS), {}).effect(expression.value) == effect
