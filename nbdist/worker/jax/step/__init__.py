"""Steps under JAX."""
