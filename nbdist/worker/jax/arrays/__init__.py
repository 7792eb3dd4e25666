"""Arrays and pytrees that span several processes.

Leaves, replicas, checkpoints, datasets and callbacks.
"""
