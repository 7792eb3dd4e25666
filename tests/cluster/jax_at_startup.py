"""A module that a user has imported at Python's start, say, and that leaves JAX with a backend."""

import jax

DEVICES = jax.devices()
