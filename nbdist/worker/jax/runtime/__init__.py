"""Processes, platforms, coordination service and compilation cache of JAX."""
