"""Execution of cells on a cluster: monitoring, cancellation, recovery, and stored runs."""
