"""A step cell under JAX as one jitted function: its arguments, carried state and Python objects."""
