"""Profiles of steps and cells, and microbenchmarks of devices."""
