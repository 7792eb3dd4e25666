"""`stages` and `pipelined`: pipeline parallelism for the user's own JAX functions."""
