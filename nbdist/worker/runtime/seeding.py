"""Seeds of the random generators of this process.

nbdist does not use `keras.utils.set_random_seed`: it imports Keras and TensorFlow, and a cell
decides whether and how to import these (`KERAS_BACKEND`).
"""

from __future__ import annotations

import functools
import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.private_api import keras as private_keras
from nbdist.worker.runtime import context, import_hooks

if TYPE_CHECKING:
    from collections.abc import Callable


class ClusterSeed(int):
    """Seed of the cluster. The type shows that no cell has set TensorFlow's seed to any value."""


def _same_on_all_ranks(
    upstream: Callable[..., np.random.Generator],
) -> Callable[..., np.random.Generator]:
    """Return `np.random.default_rng` with a seed of the cell, if it gets none."""

    @functools.wraps(upstream)
    def default_rng(seed: Any = None) -> np.random.Generator:
        worker = context.if_any()
        if seed is None and worker is not None:
            state = worker.cell_state
            state.generators += 1
            key = worker.identity.seed, state.source, state.generators
            seed = np.random.SeedSequence(key)
        return upstream(seed)

    return default_rng


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy, TensorFlow, Keras and PyTorch.

    `np.random.default_rng()` without a seed gets one that is equal on all ranks.

    A framework that is not imported yet is seeded when a cell imports it. That import leaves the
    generators of Python and NumPy unchanged.

    Args:
        seed: 0 to 2**32 - 1; a `ClusterSeed` if it is the cluster's seed and not a cell's.
    """
    import_hooks.keep_generators()
    if not hasattr(np.random.default_rng, "__wrapped__"):
        np.random.default_rng = _same_on_all_ranks(np.random.default_rng)
    random.seed(seed)
    np.random.seed(seed)
    # Setting TensorFlow's seed creates no op and starts no runtime: a strategy can still be built.
    import_hooks.once_imported(
        "tensorflow", lambda: importlib.import_module("tensorflow").random.set_seed(seed)
    )
    import_hooks.once_imported("keras", functools.partial(_seed_keras, seed))
    import_hooks.once_imported("torch", lambda: sys.modules["torch"].manual_seed(seed))


def _seed_keras(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does to Keras itself, in tested versions."""
    if not private_keras.SEEDS.is_supported("the weights of its models have other random numbers"):
        return
    from nbdist.private_api.keras import GLOBAL_RANDOM_SEED, GLOBAL_SEED_GENERATOR, global_state

    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
