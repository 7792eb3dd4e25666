"""Hosts from batch schedulers and Kubernetes.

Job submission, allocations, and the connection back to the notebook.
"""
