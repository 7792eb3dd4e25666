"""JAX's processes, platforms, coordination service and compilation cache."""
