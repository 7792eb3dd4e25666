"""Dimensions that scans over layers go over, and the numbers of stages and blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.planner.graph.layers import blocks_of, stages_of
from tests.plan_models import model_of_program, traced
from tests.plan_programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_layers_are_scans_over_stacked_parameters(name: str) -> None:
    """The time steps of an LSTM are no layers."""
    found = stages_of(model_of_program(name))
    assert found == ((2, 3, 4) if name == "tied transformer" else ())


def test_stages_fit_and_blocks_divide_the_layers_of_all_scans() -> None:
    def step(params: Any, _: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for own in params:
                x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, own)
            return (x**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    model = traced(step, [jnp.zeros((n, 4, 4)) for n in (12, 8)], (), jnp.zeros((16, 4)))
    assert stages_of(model) == (2, 3, 4, 5, 6, 7, 8)
    assert blocks_of(model) == (2, 4)
