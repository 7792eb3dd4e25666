"""Names of the batches of a training loop whose rows only the step reads."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

import pytest

from nbdist.worker.lifting.batch_names import BatchNames, with_data
from nbdist.worker.lifting.jax_callees import JaxCallees
from nbdist.worker.lifting.rewrite import LoopProgram, lift

STEP = """
def step(w, x, y):
    return grad(w, x, y)
"""


def grad(*_: Any) -> float:
    """Double of a gradient of JAX."""
    return 0.0


grad.__module__ = "jax"


def names_of(cell: str) -> BatchNames:
    """Return the names of the batches of the only training loop in a cell."""
    source = STEP + dedent(cell)
    tree = ast.parse(source)
    _, programs = lift(tree, source, JaxCallees(tree, {"grad": grad}))
    (program,) = programs.values()
    assert isinstance(program, LoopProgram)
    return program.batches


READ_BY_STEP = {
    "two names": ("for x, y in data:\n    w = step(w, x, y)", "x y", ""),
    "number of the step": ("for i, (x, y) in enumerate(data):\n    w = step(w, x, y)", "x y", ""),
    "progress bar": (
        "for i, (x, y) in enumerate(tqdm(data, total=8)):\n    w = step(w, x, y)",
        "x y",
        "",
    ),
    "sizes": (
        "for x, y in data:\n    w = step(w, x, y)\n    n += x.shape[0] + len(y)",
        "x y",
        "",
    ),
    "parts of a batch": (
        "for batch in data:\n    x, y = batch['x'], batch['y']\n    w = step(w, x, y)",
        "batch x y",
        "",
    ),
    "read after the loop": (
        "for x, y in data:\n    w = step(w, x, y)\nprint(x)",
        "x y",
        "x",
    ),
    "parameter of a function": (
        "for x, y in data:\n    w = step(w, x, y)\ndef show(x):\n    print(x)",
        "x y",
        "",
    ),
    "in a function": (
        "def train(w, data):\n    for x, y in data:\n        w = step(w, x, y)\n    return w, y",
        "x y",
        "y",
    ),
    "in a function with a nested function": (
        """
def show(x):
    def total():
        return sum(x)
    return total()
for x, y in data:
    w = step(w, x, y)""",
        "x y",
        "",
    ),
    "condition on a size": (
        "for x, y in data:\n    if len(x) == 8:\n        w = step(w, x, y)",
        "x y",
        "",
    ),
}
CONVERTED = {
    "in the call": ("for b in data:\n    w = step(w, jnp.asarray(b['x']), np.array(b['y']))", "b"),
    "in keywords": ("for b in data:\n    w = step(w, x=jnp.asarray(b['x'], dtype=f), y=b[1])", "b"),
    "before the call": (
        "for b in data:\n    x = jnp.asarray(b['x']) / 255.0\n    w = step(w, x, b['y'])",
        "b x",
    ),
    "twice": (
        """
for b in data:
    x, y = b
    x, y = jnp.array(x), jnp.array(y)
    x = (abs(x.astype(f)) - mean) / std
    w = step(w, x[..., None], y)""",
        "b x y",
    ),
    "after other statements": (
        """
for x, y in data:
    key, own = split(key)
    n += len(x)
    x = jnp.asarray(x)
    w = step(w, x, y)""",
        "x y",
    ),
    "flat": ("for x, y in data:\n    w = step(w, x.reshape(x.shape[0], -1), y[:, None])", "x y"),
    "tree": (
        "for b in data:\n    b = jax.tree.map(lambda v: jnp.asarray(v), b)\n    w = step(w, *b)",
        "b",
    ),
    "items": (
        """
for b in data:
    b = {k: jnp.asarray(v) for k, v in b.items() if k != 'id'}
    w = step(w, b, b)""",
        "b",
    ),
    "dict": (
        "for x, y in data:\n    b = {'x': jnp.array(x), 'n': 1}\n    w = step(w, b, y)",
        "b x y",
    ),
    "in place": ("for x, y in data:\n    x /= 255\n    w = step(w, x, y)", "x y"),
    "part in place": (
        """
for b in data:
    x, y = b['x'], b['y']
    x -= mean
    y = y.astype(f)
    y *= 2
    w = step(w, x, y)""",
        "b x y",
    ),
    "only view in place": (
        "for x, y in data:\n    x = x.astype(f)[:, 1:]\n    x /= 255\n    w = step(w, x, y)",
        "x y",
    ),
    "comparison": (
        "for x, y in data:\n    m = (x > 0) & (y == 1)\n    w = step(w, jnp.where(m, x, 0), y)",
        "m x y",
    ),
    "function": (
        """
def normalize(x, mean=0):
    'Scale pixels.'
    scale = 1 / 255
    x = x.astype(f)
    x *= scale
    return (x - mean) / std
for x, y in data:
    x = normalize(x, mean=m)
    w = step(w, x, y)""",
        "x y",
    ),
    "function of two batches": (
        """
def scale(x):
    return jnp.asarray(x) / 255
def prepare(x, y):
    return scale(x), jax.nn.one_hot(y, 3)
for x, y in data:
    x, y = prepare(x, y)
    w = step(w, x, y)""",
        "x y",
    ),
    "function of a dict": (
        """
def prepare(batch):
    return {'x': batch['x'] / 2, 'y': batch['y']}
for b in data:
    w = step(w, prepare(b), b)""",
        "b",
    ),
    "tree by a function": (
        """
def half(part):
    return part / 2
for b in data:
    b = jax.tree.map(half, b)
    w = step(w, b, b)""",
        "b",
    ),
    "`map`": ("for b in data:\n    x, y = map(jnp.asarray, b)\n    w = step(w, x, -y)", "b x y"),
}
"""Loops that convert batches row by row, and names of batches."""

READ_BY_OTHERS = {
    "mean": "for x, y in data:\n    w = step(w, x - x.mean(), y)",
    "mean before the step": "for x, y in data:\n    x = x / x.max()\n    w = step(w, x, y)",
    "function of the user": "for x, y in data:\n    x = prepare(x)\n    w = step(w, x, y)",
    "converted and read": "for x, y in data:\n    x = jnp.asarray(x)\n    w = step(w, x, y)\n"
    "    print(x)",
    "read before it is converted": "for b in data:\n    print(x)\n    x = jnp.asarray(b)\n"
    "    w = step(w, x, b)",
    "converted with the last batch": "for x in data:\n    d = x - last\n    last = x\n"
    "    w = step(w, d, x)",
    "view of rows changed in place": "for x, y in data:\n    z = x[:, 1:]\n    z /= 2\n"
    "    w = step(w, z, y)",
    "rows with a view changed in place": "for b in data:\n    x, z = b[0], b[0].reshape(4, 2)\n"
    "    x /= 2\n    w = step(w, x, z)",
    "tree changed in place": "for b in data:\n    x, y = jax.tree.map(np.asarray, b)\n"
    "    x /= 2\n    w = step(w, x, y)",
    "row before a change in place": "for x, y in data:\n    z = x[0]\n    x /= 2\n"
    "    w = step(w, x, z)",
    "row changed in place": "for x, y in data:\n    z = x[0]\n    z /= 2\n    w = step(w, x, z)",
    "named argument of a method": "for x, y in data:\n    x = x.clip(min=0.0)\n"
    "    w = step(w, x, y)",
    "function of TensorFlow": "for x, y in data:\n    x = tf.reshape(x, (8, 6))\n"
    "    w = step(w, x, y)",
    "changed in place by rows": "for x, y in data:\n    x /= x.max()\n    w = step(w, x, y)",
    "function of a global batch": "def own(v):\n    return v - x\nfor x, y in data:\n"
    "    y = own(y)\n    w = step(w, x, y)",
    "converted in an `if`": "for x, y in data:\n    if f:\n        x = jnp.array(x)\n"
    "    w = step(w, x, y)",
    "converted after the step": "for x, y in data:\n    w = step(w, x, y)\n    x = jnp.array(x)",
    "lambda with another batch": "for x, y in data:\n"
    "    w = step(w, jax.tree.map(lambda v: v / x.sum(), x), y)",
    "some rows": "for x, y in data:\n    x = x[1:]\n    w = step(w, x, y)",
    "iterator": "for b in data:\n    x = map(jnp.asarray, b)\n    w = step(w, x, b)",
    "tree by a function of the user": "for b in data:\n    b = jax.tree.map(prepare, b)\n"
    "    w = step(w, b, b)",
    "after the step": "for x, y in data:\n    w = step(w, x, y)\n    print(x)",
    "before the step": "for x, y in data:\n    z = sorted(x)\n    w = step(w, z, y)",
    "in the call of the step": "for i, (x, y) in enumerate(data):\n    w = step(w, x[: i + 1], y)",
    "in a function": "def show():\n    print(x)\nfor x, y in data:\n    w = step(w, x, y)",
    "in a lambda": "show = lambda: x\nfor x, y in data:\n    w = step(w, x, y)\n    show()",
    "in `eval`": "for x, y in data:\n    w = step(w, x, y)\n    eval('x')",
    "in `else`": "for x, y in data:\n    w = step(w, x, y)\nelse:\n    print(x)",
    "changed": "for x, y in data:\n    x[0] = 1\n    w = step(w, x, y)",
    "replaced": "for x, y in data:\n    w = step(w, x, y)\n    x = 1",
    "deleted": "for x, y in data:\n    w = step(w, x, y)\n    del x",
    "after an error": "try:\n    for x, y in data:\n        w = step(w, x, y)\nfinally:\n"
    "    print(x)",
    "global name of a function": "def train(w):\n    global x\n    for x, y in data:\n"
    "        w = step(w, x, y)",
    "attribute as a name": "for o.x, y in data:\n    w = step(w, o.x, y)",
    "body of a class": "class A:\n    for x, y in data:\n        w = step(w, x, y)",
    "rank": "for x, y in data:\n    w = step(w + rank, x, y)",
}


OWN_FUNCTIONS = {
    "mean": "def own(x):\n    return x / x.mean()",
    "print": "def own(x):\n    print(x)\n    return x / 2",
    "list": "def own(x):\n    s.append(x)\n    return x / 2",
    "condition": "def own(x):\n    if f:\n        return x / 2\n    return x",
    "change of the argument": "def own(x):\n    x /= 2\n    return x",
    "change of a view": "def own(x):\n    z = x[:, 1:]\n    z /= 2\n    return x",
    "compiled": "@jax.jit\ndef own(x):\n    return x / 2",
    "only a docstring": "def own(x):\n    'Return x.'",
    "decorator": "@cached\ndef own(x):\n    return x / 2",
    "any arguments": "def own(*x):\n    return x[0] / 2",
    "recursion": "def own(x):\n    return own(x)",
    "two functions of one name": "def own(x):\n    return x / 2\ndef own(x):\n    return x / 3",
    "no result": "def own(x):\n    x = x / 2",
    "a result of its own": "def own(x):\n    x = x / 2\n    return 1",
    "class": "class own:\n    def __init__(self, x):\n        self.x = x",
}
"""Functions of the user that may use rows of a batch in another way than row by row."""


@pytest.mark.parametrize(("cell", "every", "later"), READ_BY_STEP.values(), ids=READ_BY_STEP)
def test_rows_that_only_the_step_reads(cell: str, every: str, later: str) -> None:
    assert names_of(cell)[:2] == (tuple(sorted(every.split())), tuple(later.split()))


@pytest.mark.parametrize(("cell", "every"), CONVERTED.values(), ids=CONVERTED)
def test_conversions(cell: str, every: str) -> None:
    found = names_of(cell)
    assert found.every == tuple(every.split())
    assert found.conversions


@pytest.mark.parametrize("cell", READ_BY_OTHERS.values(), ids=READ_BY_OTHERS)
def test_rows_that_others_read(cell: str) -> None:
    assert names_of(cell) == BatchNames()


@pytest.mark.parametrize("function", OWN_FUNCTIONS.values(), ids=OWN_FUNCTIONS)
def test_functions_that_may_read_all_rows(function: str) -> None:
    loop = "for x, y in data:\n    x = own(x)\n    w = step(w, x, y)"
    assert names_of(f"{function}\n{loop}") == BatchNames()


def test_data_of_a_loop() -> None:
    iterable = ast.parse("enumerate(tqdm(data, total=8), 1)", mode="eval").body
    changed = with_data(iterable, lambda _: ast.Name("other", ast.Load()))
    assert ast.unparse(changed) == "enumerate(tqdm(other, total=8), 1)"
    assert ast.unparse(iterable) == "enumerate(tqdm(data, total=8), 1)"
