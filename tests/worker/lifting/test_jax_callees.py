"""Loops and calls under JAX that take gradients, found by name and by the wrappers of functions."""

from __future__ import annotations

import ast
import linecache
from textwrap import dedent
from typing import Any

import pytest
from jax._src import traceback_util

from nbdist.cells.loop_division import divide
from nbdist.cells.loops import LoopError, training_loops, undivided
from nbdist.worker.lifting.jax_callees import JaxCallees

EARLIER = """
import functools
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import grad, value_and_grad

def loss_fn(p, x):
    return (p * x).sum()

@jax.jit
def train_step(p, x):
    loss, g = jax.value_and_grad(loss_fn)(p, x)
    return p - g, loss

@eqx.filter_value_and_grad
def decorated(p, x):
    return (p * x).sum()

@functools.partial(jax.value_and_grad, has_aux=True)
def partly(p, x):
    return (p * x).sum(), x

def make_step():
    def step(p, x):
        return grad(loss_fn)(p, x)
    return jax.jit(step)

made = make_step()
of_jax = jax.value_and_grad(loss_fn)
compiled = jax.jit(jax.grad(loss_fn))
of_flax = nnx.jit(nnx.value_and_grad(loss_fn))
of_equinox = eqx.filter_jit(decorated)
of_optax = optax.value_and_grad_from_state(loss_fn)
plain = jax.jit(loss_fn)
solver = optax.adam(0.1)

def epoch(p, data):
    for x in data:
        p, loss = train_step(p, x)
    return p

@jax.jit
def scanned_epoch(p, batches):
    xs, ys = batches
    def body(p, batch):
        loss, g = jax.value_and_grad(loss_fn)(p, batch[0])
        return p - g, loss
    return jax.lax.scan(body, p, (xs, ys))

def slices(data, i):
    return jax.lax.dynamic_slice_in_dim(data, i * 4, 4)

@jax.jit
def sliced_epoch(p, data):
    return jax.lax.fori_loop(0, 9, lambda i, p: train_step(p, slices(data, i))[0], p)

def named_lambda(p, data):
    body = lambda i, p: train_step(p, slices(data, i))[0]
    return jax.lax.fori_loop(0, 9, body, p)

def indexed_epoch(p, data, rows):
    return jax.lax.scan(lambda p, i: train_step(p, data[i]), p, rows + 1)

def whole_data(p, data):
    return jax.lax.scan(lambda p, _: train_step(p, data), p, None, length=9)

@jax.jit
def through_scan(p, x):
    def inner(p, x):
        return jax.lax.scan(train_step, p, x)[0].sum()
    return p - jax.grad(inner)(p, x)

class Trainer:
    def __init__(self):
        def inner(p, x):
            return jax.grad(loss_fn)(p, x)
        self.step = jax.jit(inner)
        self.score = jax.jit(loss_fn)

    def eval(self, x):
        return self.score(1.0, x)

    def update(self, p, x):
        return p - self.step(p, x)

trainer = Trainer()
"""


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """Return the namespace after a cell of the user, whose source is known."""
    name, lines = "<earlier jax>", EARLIER.splitlines(keepends=True)
    linecache.cache[name] = (len(EARLIER), None, lines, name)
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(EARLIER, name, "exec"), found)
    return found


@pytest.mark.parametrize(
    ("call", "takes"),
    [
        ("train_step(p, x)", True),
        ("decorated(p, x)", True),
        ("partly(p, x)", True),
        ("made(p, x)", True),
        ("of_jax(p, x)", True),
        ("compiled(p, x)", True),
        ("of_flax(p, x)", True),
        ("of_equinox(p, x)", True),
        ("of_optax(p, state=x)", True),
        ("jax.lax.scan(train_step, p, x)", True),
        ("trainer.step(p, x)", True),
        ("self.step(p, x)", True),
        ("plain(p, x)", False),
        ("trainer.eval(x)", False),
        ("self.score(p, x)", False),
        ("epoch(p, x)", False),
        ("solver.update(g, s)", False),
        ("jnp.sum(x)", False),
        ("unknown(x)", False),
    ],
)
def test_calls_that_take_gradients(namespace: dict[str, Any], call: str, takes: bool) -> None:
    tree = ast.parse(call)
    (expression,) = tree.body
    assert isinstance(expression, ast.Expr)
    assert isinstance(expression.value, ast.Call)
    assert JaxCallees(tree, namespace).takes_gradient(expression.value) == takes


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("scanned_epoch(p, x)", "batches"),
        ("jax.lax.scan(train_step, p, x)", "batches"),
        ("scanned_epoch(p, (x[i], labels))", "batches"),
        ("scanned_epoch(p, all_data.reshape(5, 8, 4))", "inside"),
        ("sliced_epoch(p, x)", "inside"),
        ("named_lambda(p, x)", "inside"),
        ("indexed_epoch(p, x, rows)", "inside"),
        ("whole_data(p, x)", ""),
        ("through_scan(p, x)", ""),
        ("train_step(p, x)", ""),
    ],
)
def test_compiled_loops_over_batches(namespace: dict[str, Any], call: str, expected: str) -> None:
    cell = f"for i, x in enumerate(data):\n    out = {call}"
    callees = JaxCallees(ast.parse(cell), namespace)
    (loop,) = training_loops(ast.parse(cell), callees)
    assert divide(loop, callees).scan == expected


@pytest.mark.parametrize(
    ("line", "effect"),
    [
        ("p = trainer.update(p, x)", ""),
        ("losses.append(trainer.update(p, x))", "`losses.append(trainer.update(p, x))`"),
    ],
)
def test_method_with_the_name_of_an_effect(
    namespace: dict[str, Any], line: str, effect: str
) -> None:
    tree = ast.parse(f"for x in data:\n    {line}")
    callees = JaxCallees(tree, namespace)
    (loop,) = training_loops(tree, callees)
    assert divide(loop, callees).effect == effect


def test_source_of_a_library_that_python_has_read_changes_nothing(
    namespace: dict[str, Any],
) -> None:
    """Ranks must agree, and a traceback on one rank reads sources of libraries."""
    linecache.getlines(traceback_util.__file__)
    tree = ast.parse("compiled(p, x)")
    (expression,) = tree.body
    assert JaxCallees(tree, namespace).takes_gradient(expression.value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("for x in data:\n    g = jax.grad(loss_fn)(p, x)", [1]),
        ("for x in data:\n    l, g = value_and_grad(loss_fn)(p, x)", [1]),
        ("for x in data:\n    l = jax.jit(loss_fn)(p, x)", []),
        ("for e in range(3):\n    p = epoch(p, data)", []),
        ("for e in range(3):\n    for x in data:\n        p, loss = train_step(p, x)", [2]),
        ("for name, grad in pairs:\n    print(name, grad)", []),
        ("made_here = make_step()\nfor x in data:\n    p = made_here(p, x)", [2]),
        (
            "for x in data:\n    p = train_step(p, x)\n    for t in test:\n        l = plain(p, t)",
            [1],
        ),
        ("step = jax.jit(train_step)\nfor x in data:\n    p, l = step(p, x)", [2]),
        ("self.step = train_step\nfor x in data:\n    self.p, l = self.step(self.p, x)", [2]),
    ],
)
def test_innermost_loops_over_data_are_training_loops(
    namespace: dict[str, Any], cell: str, lines: list[int]
) -> None:
    tree = ast.parse(cell)
    found = training_loops(tree, JaxCallees(tree, namespace))
    assert [loop.lineno for loop in found] == lines


@pytest.mark.parametrize(
    ("outer", "inner", "is_training"),
    [
        ("rates\n  p = start", "p, l = train_step(p, x)", True),
        ("kinds\n  p, s = x()", "g = compiled(p, X)\n    s, p = s + g, p - s", True),
        ("seeds\n  net = Net(x)", "loss = train_step(net, X)", True),
        ("data", "p, l = train_step(p, x)", False),
        ("data\n  h = zeros()", "p, h = train_step(p, h, x)", False),
        ("data\n  b = jnp.asarray(x)", "loss = train_step(net, b)", False),
        ("data\n  k, s = split(k)", "p, k = train_step(p, x, k)", False),
        ("data\n  q, l = train_step(q, x)\n  p = q", "p, l = train_step(p, x)", False),
    ],
)
def test_loop_whose_passes_begin_with_new_state_has_no_batches(
    namespace: dict[str, Any], outer: str, inner: str, is_training: bool
) -> None:
    cell = f"for x in {outer}\n  for i in range(3):\n    {inner}".replace("\n", ":\n", 1)
    tree = ast.parse(cell)
    (loop,) = training_loops(tree, JaxCallees(tree, namespace))
    assert loop.col_offset == (2 if is_training else 0)


@pytest.mark.parametrize(
    ("body", "given", "late"),
    [
        ("p, loss = train_step(p, x)", ["x"], ()),
        ("p, loss = train_step(p, jnp.asarray(x))", ["jnp.asarray(x)"], ()),
        ("p, loss = train_step(p, x.numpy())", ["x.numpy()"], ()),
        ("p, loss = train_step(p, next(it))", ["next(it)"], ()),
        ("p, loss = train_step(p, X[order[x]])", ["X[order[x]]"], ()),
        ("p, loss = train_step(p, pick(x, data))", ["pick(x, data)"], ()),
        ("p, loss = train_step(p, pick(p, x))", ["x"], ()),
        ("p, loss = train_step(p, {k: x[k] for k in x})", ["{k: x[k] for k in x}"], ()),
        ("p, loss = train_step(p, [p[k] + x for k in p])", ["x"], ()),
        ("p, loss = train_step(p, x)\n    q, l = train_step(q, pick(x))", ["x"], ()),
        (
            "p, loss = train_step(p, x)\n    q, l = train_step(q, jnp.sin(x))",
            ["x", "jnp.sin(x)"],
            (),
        ),
        ("p, loss = train_step(p, jnp.sin(x) if x else 0)", ["x"], ()),
        ("loss, g = of_jax(p, x)\n    if x:\n        p = apply(p, g)", ["p", "x"], ("p",)),
        ("print(x)\n    p, loss = train_step(p, x)\n    print(loss)", ["x"], ()),
    ],
)
def test_loop_gives_the_inputs_of_its_step(
    namespace: dict[str, Any], body: str, given: list[str], late: tuple[str, ...]
) -> None:
    cell = f"for x in data:\n    {body}"
    tree = ast.parse(cell)
    callees = JaxCallees(tree, namespace)
    (loop,) = training_loops(tree, callees)
    divided = divide(loop, callees)
    assert [ast.unparse(value) for value in divided.given.values()] == given
    assert divided.late == late


def test_only_statements_that_leave_the_loop_are_refused(namespace: dict[str, Any]) -> None:
    """A step of JAX runs as written, so its prints and its other effects remain."""
    kept = """
        for x in data:
            with scope:
                p, loss = train_step(p, x)
                print(loss.item())
                log["loss"] = loss
        """
    tree = ast.parse(dedent(kept))
    callees = JaxCallees(tree, namespace)
    (loop,) = training_loops(tree, callees)
    assert divide(loop, callees).outputs == ("p", "loss")

    tree = ast.parse(dedent(kept).replace("print(loss.item())", "break"))
    (loop,) = training_loops(tree, callees)
    with pytest.raises(LoopError, match="line 5: `break` is inside the statement"):
        divide(loop, callees)


UNDIVIDED = {
    "[update(w, x) for x in data]": "a comprehension",
    "list(map(lambda x: update(w, x), data))": "`map` or `reduce`",
    "w = functools.reduce(update, data, w)": "`map` or `reduce`",
    "w = jax.lax.fori_loop(0, 9, lambda i, w: update(w, data[i]), w)": "a compiled loop",
    "w = train(w)": "a compiled loop",
    "[x + 1 for x in data]": "",
    "for x in data:\n    w = update(w, x)": "",
    "w = update(w, data[0])": "",
}
FUNCTIONS = """
import functools
import jax

def update(w, x):
    return w - jax.grad(lambda w: (w * x) ** 2)(w)

@jax.jit
def train(w):
    return jax.lax.scan(lambda w, x: (update(w, x), None), w, None, length=3)[0]
"""


@pytest.mark.parametrize("cell", UNDIVIDED)
def test_training_without_a_loop_of_python_is_described(cell: str) -> None:
    tree = ast.parse(f"{FUNCTIONS}\n{cell}")
    found = [form.split(":")[0] for _, form in undivided(tree, JaxCallees(tree, {}))]
    assert found == [UNDIVIDED[cell]] * bool(UNDIVIDED[cell])


FORMS = {
    "callable object": """
class Step:
    def __call__(self, w, x):
        return w - jax.grad(f)(w, x)
step = Step()
""",
    "factory of two functions": """
def make():
    def step(w, x):
        return w - jax.grad(f)(w, x)
    return step, f
step, other = make()
""",
    "item of a dict": """
steps = {"train": jax.jit(update)}
step = steps["train"]
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_functions_in_other_forms_take_gradients(form: str) -> None:
    tree = ast.parse(f"{FUNCTIONS}{FORMS[form]}for x in data:\n    w = step(w, x)")
    assert list(training_loops(tree, JaxCallees(tree, {})))


def test_gradient_in_a_name_is_no_function() -> None:
    cell = """
for x in data:
    g = jax.grad(f)(w, x)
    w = w - g
    if abs(g) < 1:
        break
"""
    tree = ast.parse(cell)
    (loop,) = training_loops(tree, callees := JaxCallees(tree, {}))
    assert divide(loop, callees).step
