"""Keras under MultiWorkerMirroredStrategy.

`fit`, `evaluate` and `predict` compute the numbers of one device.
"""
