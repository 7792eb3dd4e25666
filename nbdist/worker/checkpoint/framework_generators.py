"""Random generators of TensorFlow, Keras and Flax NNX: objects whose state is in arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def is_generator(value: Any) -> bool:
    """Return True for a generator of a framework."""
    return _is_variable(value) or _is_of_nnx(value)


def state_of(value: Any) -> list[Any]:
    """Return the state of a generator as a list of arrays."""
    if _is_variable(value):
        return [np.asarray(value.state)]
    flax = sys.modules["flax.nnx"]
    leaves: list[Any] = sys.modules["jax"].tree.leaves(flax.state(value))
    return leaves


def set_state(value: Any, state: list[Any]) -> bool:
    """Set the state of a generator in place.

    Args:
        value: the generator.
        state: arrays of `state_of` for a generator with the same names of streams.

    Returns:
        False if the generator has other arrays, such as those of a further stream. It then keeps
        its present state.
    """
    if [(a.shape, a.dtype) for a in state_of(value)] != [(a.shape, a.dtype) for a in state]:
        return False
    if _is_variable(value):
        value.state.assign(state[0])
        return True
    flax, jax = sys.modules["flax.nnx"], sys.modules["jax"]
    structure = jax.tree.structure(flax.state(value))
    flax.update(value, jax.tree.unflatten(structure, state))
    return True


def _is_variable(value: Any) -> bool:
    """Return True for a generator whose state is one variable."""
    tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
    return (tensorflow is not None and isinstance(value, tensorflow.random.Generator)) or (
        keras is not None and isinstance(value, keras.random.SeedGenerator)
    )


def _is_of_nnx(value: Any) -> bool:
    flax = sys.modules.get("flax.nnx")
    return flax is not None and isinstance(value, (flax.Rngs, flax.RngStream))
