"""Public JAX API for data and pipelines on devices, in a worker or in a plain kernel."""
