"""Keras's `fit` in a cell on either backend.

Reports, checkpoints, timing, comparison of replicas.
"""
