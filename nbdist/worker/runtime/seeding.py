"""Seeds of the random generators of this process.

nbdist does not use `keras.utils.set_random_seed`: it imports Keras and TensorFlow, and a cell
decides whether and how to import these (`KERAS_BACKEND`).
"""

from __future__ import annotations

import functools
import importlib
import random

import numpy as np

from nbdist.worker.runtime import import_hooks


class ClusterSeed(int):
    """Seed of the cluster. The type shows that no cell has set TensorFlow's seed to any value."""


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy, TensorFlow and Keras.

    A framework that is not imported yet is seeded when a cell imports it. That import leaves the
    generators of Python and NumPy unchanged.

    Args:
        seed: 0 to 2**32 - 1; a `ClusterSeed` if it is the cluster's seed and not a cell's.
    """
    import_hooks.keep_generators()
    random.seed(seed)
    np.random.seed(seed)
    # Setting TensorFlow's seed creates no op and starts no runtime: a strategy can still be built.
    import_hooks.once_imported(
        "tensorflow", lambda: importlib.import_module("tensorflow").random.set_seed(seed)
    )
    import_hooks.once_imported("keras", functools.partial(_seed_keras, seed))


def _seed_keras(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does to Keras itself."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
