"""Cells on a cluster.

Execution, monitoring, cancellation, recovery, and the run as it is recorded and read back.
"""
