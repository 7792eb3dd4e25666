"""The user's arrays across a rebuild of JAX's backend."""
