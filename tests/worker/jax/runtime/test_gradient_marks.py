"""Gradients that a step takes, found in its program or received by callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.jax.runtime.gradient_marks import Evaluated, evaluated, receiving, take_received

if TYPE_CHECKING:
    from collections.abc import Callable

W = np.array([1.0, 2.0, 3.0], np.float32)
X = np.array([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]], np.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


EXPECTED = np.asarray(jax.grad(loss)(W, X))


def plain(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(loss)(w, x)


jitted = jax.jit(plain)
jitted(W, X)  # JAX keeps its program without marks


def twice(w: Any, x: Any) -> Any:
    """Call a function with a gradient twice; the first gradient is that of the argument."""
    return jitted(jitted(w, x), x)


def with_penalty(w: Any, x: Any) -> Any:
    """Take a gradient of a loss that contains a gradient."""

    def penalized(w: Any) -> Any:
        return loss(w, x) + 0 * jnp.sum(jax.grad(loss, argnums=1)(w, x))

    return w - 0.1 * jax.value_and_grad(penalized)(w)[1]


def of_rows(w: Any, x: Any) -> Any:
    """Take a gradient for each row."""
    return w - 0.1 * jax.vmap(jax.grad(loss), (None, 0))(w, x).mean(0)


def accumulated(w: Any, x: Any) -> Any:
    """Take gradients in a loop of JAX."""
    total, _ = jax.lax.scan(lambda sum_, row: (sum_ + jax.grad(loss)(w, row), 0), 0 * w, x[:, None])
    return w - 0.05 * total


def in_program(step: Callable[[Any, Any], Any]) -> tuple[Any, Evaluated, list[Any]]:
    """Return the result of a step, and the gradients whose source is its first argument."""
    notes: list[Any] = []

    def run(w: Any, x: Any) -> Any:
        found = evaluated(step, w, x)
        notes.append(found)
        own = [g.gradient for g in found.gradients if g.source is w]
        return found.outputs, own

    outputs, own = jax.jit(run)(W, X)
    return outputs, notes[0], own


@pytest.mark.parametrize("step", [plain, jitted, with_penalty])
def test_the_gradient_of_a_step_is_found_in_its_program(step: Callable[[Any, Any], Any]) -> None:
    outputs, found, own = in_program(step)
    np.testing.assert_allclose(outputs, step(W, X), rtol=1e-6)
    (gradient,) = own
    np.testing.assert_allclose(gradient, EXPECTED, rtol=1e-6)
    assert len(found.gradients) == 1


def test_each_call_of_a_function_has_its_gradient() -> None:
    outputs, found, own = in_program(twice)
    np.testing.assert_allclose(outputs, twice(W, X), rtol=1e-6)
    (gradient,) = own
    np.testing.assert_allclose(gradient, EXPECTED, rtol=1e-6)
    assert len(found.gradients) == 2
    assert not found.has_inner


@pytest.mark.parametrize("step", [of_rows, accumulated])
def test_parts_of_a_gradient_are_no_gradient(step: Callable[[Any, Any], Any]) -> None:
    outputs, found, _ = in_program(step)
    np.testing.assert_allclose(outputs, step(W, X), rtol=1e-6)
    assert found.gradients == []
    assert found.has_inner


@pytest.mark.parametrize("step", [plain, jitted, with_penalty])
def test_sums_of_squares_are_received(step: Callable[[Any, Any], Any]) -> None:
    with receiving(histograms=False):
        step(W, X)
    (call,) = take_received()
    assert call.shapes == ((3,),)
    np.testing.assert_allclose(call.sources, [14])
    np.testing.assert_allclose(call.gradients, [np.sum(EXPECTED**2)], rtol=1e-6)
    assert not call.rows


def test_histograms_are_received_on_request() -> None:
    with receiving(histograms=True):
        jitted(W, X)
    (row,) = take_received()[0].rows
    assert row[6:].sum() == 3


def test_gradients_of_rows_are_not_received() -> None:
    with receiving(histograms=False):
        of_rows(W, X)
    assert take_received() == []


def test_functions_are_unchanged_afterwards() -> None:
    upstream = jax.vjp
    with receiving(histograms=False):
        jitted(W, X)
    assert jax.vjp is upstream
    assert "name" not in str(jax.make_jaxpr(plain)(W, X))
    assert "callback" not in str(jax.make_jaxpr(jitted)(W, X))
