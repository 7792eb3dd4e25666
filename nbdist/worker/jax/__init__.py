"""JAX on a rank: the backend over several processes, and the strategy."""
