"""Arrays and pytrees over several processes.

Leaves, replicas, checkpoints, data sets, callbacks.
"""
