"""Kinds of equations: equal work has one number, whatever the names of its variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.jaxpr.pipeline.equation_kinds import Kinds

if TYPE_CHECKING:
    from collections.abc import Callable


def looped(add: Callable[[Any], Any]) -> Any:
    """Return the equation of a loop whose body adds something."""
    made = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: add(x), x))(jnp.ones(4))
    return made.eqns[-1]


def kinds(*adds: Callable[[Any], Any]) -> list[int]:
    found = Kinds()
    return [found.number(looped(add)) for add in adds]


def test_equal_inner_programs() -> None:
    assert kinds(lambda x: x + 1.5, lambda y: y + 1.5) == [0, 0]


def test_inner_programs_with_other_literals() -> None:
    assert kinds(lambda x: x + 1.5, lambda x: x + 1.50000012) == [0, 1]


def test_inner_programs_with_inputs_in_another_order() -> None:
    def first(x: Any) -> Any:
        return jnp.sin(x) - jnp.cos(x)

    def second(x: Any) -> Any:
        return -jnp.cos(x) + jnp.sin(x)

    assert kinds(first, second, first) == [0, 1, 0]
