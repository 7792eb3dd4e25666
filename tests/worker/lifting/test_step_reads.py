"""Values that a step reads by name: those that called functions update in place."""

from __future__ import annotations

import ast
import linecache
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.worker.lifting.step_reads import updated_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator

EARLIER = dedent("""
    import functools, types
    import jax
    import numpy as np

    def descend(w, g, rate=0.1):
        w -= rate * np.asarray(g)

    def rebind(w, g):
        w = w - g
        total = 0
        total += w.sum()
        return w

    def outer(g, weights):
        descend(weights, g)

    class Sgd:
        def apply(self, w, g):
            w -= 0.1 * g
        def __call__(self, w, g):
            w -= 0.1 * g
        @staticmethod
        def static(w, g):
            w -= g
        @classmethod
        def of_class(cls, w, g):
            w -= g

    sgd = Sgd()
    bound = sgd.apply
    sgd.kept = descend
    module = types.ModuleType("rules")
    module.descend = descend

    def loss(w, x):
        x -= x.mean()
        return (x @ w).sum()

    of_jax = jax.grad(loss)
    compiled = jax.jit(loss)

    def recursive(w):
        w += 1
        recursive(w)
""")


@pytest.fixture(scope="module")
def namespace() -> Iterator[dict[str, Any]]:
    name = "<cell of the test>"
    linecache.cache[name] = (len(EARLIER), None, EARLIER.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(EARLIER, name, "exec"), space)
    yield space
    del linecache.cache[name]


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("descend(w, g)", {"w"}),
        ("descend(g=g, w=w)", {"w"}),
        ("descend(book['w'], g)", {"book"}),
        ("descend(net.layers[0].w, g)", {"net"}),
        ("outer(g, w)", {"w"}),
        ("sgd.apply(w, g)", {"w"}),
        ("sgd(w, g)", {"w"}),
        ("sgd.static(w, g)", {"w"}),
        ("sgd.of_class(w, g)", {"w"}),
        ("sgd.kept(w, g)", {"w"}),
        ("Sgd.apply(sgd, w, g)", {"w"}),
        ("bound(w, g)", {"w"}),
        ("module.descend(w, g)", {"w"}),
        ("recursive(w)", {"w"}),
        ("rebind(w, g)", set()),
        ("descend(w + 1, g)", set()),
        ("of_jax(w, x)", set()),
        ("compiled(w, x)", set()),
        ("jax.value_and_grad(loss)(w, x)", set()),
        ("unknown(w, g)", set()),
    ],
)
def test_arguments_that_functions_update_in_place(
    step: str, found: set[str], namespace: dict[str, Any]
) -> None:
    assert updated_in_place(ast.parse(step).body, namespace) == found
