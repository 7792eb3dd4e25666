"""JAX on a rank: the multi-process backend and the strategy."""
