"""Keras 3 on JAX over the mesh of a strategy."""
