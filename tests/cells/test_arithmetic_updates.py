"""Updates by arithmetic after the gradient belong to the step of a loop under JAX."""

from __future__ import annotations

import ast
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.cells.loop_division import divide
from nbdist.cells.loops import training_loops
from nbdist.worker.lifting.jax_callees import JaxCallees

if TYPE_CHECKING:
    from nbdist.cells.loop_division import TrainingLoop

NAMESPACE = {"jax": jax, "jnp": jnp, "np": np}
FUNCTIONS = """
def loss_fn(w, x, y):
    return jnp.mean((x @ w - y - offset) ** 2)
def evaluate():
    return float(loss_fn(w, X, Y))
"""
GRADIENT = "loss, g = jax.value_and_grad(loss_fn)(w, x, y)"


def divided(body: str, gradient: str = GRADIENT, header: str = "for x, y in data:") -> TrainingLoop:
    """Return the division of a loop with these statements after its gradient."""
    lines = indent("\n".join((gradient, dedent(body).strip("\n"))), "    ")
    tree = ast.parse(f"{FUNCTIONS}\n{header}\n{lines}")
    callees = JaxCallees(tree, NAMESPACE)
    (loop,) = training_loops(tree, callees)
    return divide(loop, callees)


def texts(statements: list[ast.stmt]) -> list[str]:
    return [ast.unparse(statement) for statement in statements]


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("w = w - lr * g", ("w",)),
        ("w -= lr * g", ("w",)),
        ("w: Array = w - lr * g", ("w",)),
        ("w = [(a - lr * da, b - lr * db) for (a, b), (da, db) in zip(w, g)]", ("w",)),
        ("w = {k: v - lr * g[k] for k, v in w.items()}", ("w",)),
        ("w = tuple(a - lr * b for a, b in zip(w, g))", ("w",)),
        ("w, b = w - lr * g[0], b - lr * g[1]", ("b", "w")),
        ("(w, b), c = (w - g[0], b - g[1]), 3", ("b", "w")),
        ("v = 0.9 * v + g\nw = w - lr * v", ("v", "w")),
        ("old = v\nv = 0.9 * v - lr * g\nw = w - 0.9 * old + 1.9 * v", ("v", "w")),
        ("size = lr * g\nw = w - size", ("w",)),
        ("new = w - lr * g\nw = new", ("w",)),
        ("s = 0.9 * s + 0.1 * g ** 2\nw = w - lr * g / (jnp.sqrt(s) + 1e-8)", ("s", "w")),
        ("w = w - lr * (g / jnp.maximum(1, jnp.abs(g))).mean(0)", ("w",)),
        ("w = w - lr * g * min(1, 5 / sum(jnp.sum(a**2) for a in g))", ("w",)),
    ],
)
def test_updates_belong_to_the_step(body: str, carried: tuple[str, ...]) -> None:
    b = ", b" if "b" in carried else ""
    loop = divided(body, gradient=f"loss, g = jax.value_and_grad(loss_fn)(w{b}, x, y)")
    assert texts(loop.step)[1:] == texts(ast.parse(body).body)
    assert loop.after == []
    assert loop.carried == carried
    assert loop.kept_outside == ()


@pytest.mark.parametrize(
    "body",
    [
        "total += float(loss)",
        "total += loss",
        "total = total + loss",
        "losses = losses + [loss]",
        "step += 1",
        "lr = lr * 0.99",
        "lr *= 0.99",
        "average = 0.9 * average + 0.1 * w",
        "log['loss'] = loss",
        "print(loss)",
        "if loss < best:\n    best = loss",
    ],
)
def test_counters_and_accumulators_stay_outside(body: str) -> None:
    """The update of the weights is in the step also if such a statement is before or after it."""
    update = "w = w - lr * g"
    loop = divided(f"{update}\n{body}")
    assert texts(loop.step)[1:] == [update]
    assert texts(loop.after) == texts(ast.parse(body).body)
    assert loop.carried == ("w",)


@pytest.mark.parametrize(
    "body",
    [
        "if loss < 1e-3:\n    break\nw = w - lr * g",
        "if not jnp.isfinite(loss):\n    continue\nw = w - lr * g",
        "if loss < 1e-3:\n    break\nw = jax.tree.map(jnp.subtract, w, g)",
        "print(loss, w)\nw = w - lr * g",
        "seen.append(evaluate())\nw = w - lr * g",
        "w = project(w - lr * g)",
        "w = w - float(lr) * g",
        "v = g if step == 0 else 0.9 * v + g\nw = w - lr * v",
        "if step % 4 == 0:\n    w = w - lr * g",
        "x = x + 0.1 * jnp.sign(g)",
        "noise = rng.normal()\nw = w - lr * (g + noise)",
    ],
)
def test_updates_that_must_run_later_stay_outside(body: str) -> None:
    loop = divided(body)
    assert texts(loop.step) == [GRADIENT]
    assert loop.carried == ()


def test_hosts_that_do_not_read_the_update_may_be_before_it() -> None:
    loop = divided("losses.append(float(loss))\ntotal += loss\nw = w - lr * g")
    assert texts(loop.step) == [GRADIENT, "w = w - lr * g"]
    assert texts(loop.after) == ["losses.append(float(loss))", "total += loss"]


def test_counter_and_rate_that_the_update_reads_run_before_the_step() -> None:
    """Adam by hand: the step receives them as values that are no batch."""
    body = """
        m = 0.9 * m + 0.1 * g
        t += 1
        rate = lr / (1 - 0.9 ** t)
        w = w - rate * m
        lr = lr * 0.99
        """
    loop = divided(body)
    assert texts(loop.step) == [GRADIENT, "m = 0.9 * m + 0.1 * g", "w = w - rate * m"]
    assert texts(loop.before) == ["t += 1", "rate = lr / (1 - 0.9 ** t)"]
    assert texts(loop.after) == ["lr = lr * 0.99"]
    assert loop.carried == ("m", "w")
    assert list(loop.given) == ["x", "y", "rate"]
    assert loop.late == ("rate",)


def test_noise_for_the_weights_is_no_batch() -> None:
    body = """
        key, sub = jax.random.split(key)
        w = w - rates[i] * g + jax.random.normal(sub, (4,))
        """
    loop = divided(body, header="for i, (x, y) in enumerate(data):")
    assert texts(loop.step)[1:] == ["w = w - rates[i] * g + jax.random.normal(sub, (4,))"]
    assert texts(loop.before) == ["key, sub = jax.random.split(key)"]
    noise = [name for name, value in loop.given.items() if "normal" in ast.unparse(value)]
    assert list(loop.late) == noise


def test_calls_of_jax_by_the_host_change_nothing() -> None:
    update = "w = jax.tree.map(lambda a, b: a - lr * b, w, g)"
    loop = divided(f"losses.append(jax.device_get(loss))\n{update}")
    assert texts(loop.step)[1:] == [update]


def test_counter_that_the_gradient_reads_in_a_function_stays_behind_it() -> None:
    loop = divided("offset = offset * 0.9\nw = w - offset * g")
    assert texts(loop.step) == [GRADIENT]
    assert texts(loop.after) == ["offset = offset * 0.9", "w = w - offset * g"]


def test_rate_of_each_pass_is_a_value_of_the_step() -> None:
    loop = divided("w = w - lr * g\nlr = lr * 0.99")
    assert list(loop.given) == ["x", "y", "lr"]
    assert loop.late == ("lr",)
    assert loop.kept_outside == ("lr",)


ATTRIBUTES = "loss, g = jax.value_and_grad(loss_fn)(self.w, x, y)"


@pytest.mark.parametrize(
    ("body", "joins"),
    [
        ("self.w = self.w - self.lr * g", True),
        ("self.w -= self.lr * g", True),
        ("self.losses.append(float(loss))\nself.w -= self.lr * g", True),
        ("self.losses.append(self.evaluate())\nself.w -= self.lr * g", False),
        ("seen.append(score(self))\nself.w -= self.lr * g", False),
        ("self.total += loss", False),
        ("self.count += 1", False),
    ],
)
def test_attributes_are_updated_in_the_step(body: str, joins: bool) -> None:
    loop = divided(body, gradient=ATTRIBUTES)
    assert texts(loop.step)[1:] == texts(ast.parse(body).body)[-1:] * joins
    assert loop.mutated == ()


@pytest.mark.parametrize(
    ("body", "mutated"),
    [
        ('w["a"] = w["a"] - lr * g["a"]', ("w",)),
        ('w["a"] -= lr * g["a"]\nw["b"]["c"] -= lr * g["b"]["c"]', ("w",)),
        ('v["a"] = 0.9 * v["a"] + g["a"]\nw["a"] -= lr * v["a"]', ("v", "w")),
        ('cache["a"] = g\nw["a"] -= lr * cache["a"]', ()),
        ('w["a"] -= lr * g["a"]\nif step == 3:\n    w = start', ()),
        ('show(w)\nw["a"] -= lr * g["a"]', ()),
        ('w["a"] -= evaluate() * g["a"]', ()),
        ('log["n"] += 1', ()),
    ],
)
def test_items_are_updated_in_the_step(body: str, mutated: tuple[str, ...]) -> None:
    loop = divided(body)
    assert loop.mutated == mutated
    assert texts(loop.step)[1:] == texts(ast.parse(body).body) * bool(mutated)
    assert set(mutated) <= loop.reads.keys()


def test_dicts_whose_items_change_outside_of_the_step_are_named() -> None:
    loop = divided('show(w)\nw["a"] -= lr * g["a"]\nlog["n"] += 1')
    assert loop.kept_outside == ("w",)


def test_loop_over_conditions_has_its_update_in_the_step() -> None:
    loop = divided("w = w - lr * g", header="while loss > 0.1:")
    assert texts(loop.step) == [GRADIENT, "w = w - lr * g"]


def test_names_of_the_user_are_no_builtins() -> None:
    tree = ast.parse(f"for x, y in data:\n    {GRADIENT}\n    w = sum(w, g)")
    space: dict[str, Any] = {**NAMESPACE, "sum": print}
    callees = JaxCallees(tree, space)
    (loop,) = training_loops(tree, callees)
    assert texts(divide(loop, callees).step) == [GRADIENT]
