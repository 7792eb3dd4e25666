"""Reading and rewriting of JAX programs.

The planner's model, microbatches, rematerialization, sharding constraints.
"""
