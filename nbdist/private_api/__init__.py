"""Private names of libraries: the only modules that know where they are.

A module of nbdist imports a private name from here, such as `from nbdist.private_api.jax import
mlir`. The name is resolved at this import, so nothing is resolved in calls. Each module lists the
names, and the features that need them (`features.py`).
"""
