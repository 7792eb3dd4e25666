"""Module that creates a JAX backend at its import, like one that Python loads at startup."""

import jax

DEVICES = jax.devices()
