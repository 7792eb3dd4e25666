"""Keras's `fit` in a cell, on either backend: reports, checkpoints, timing, and comparison."""
