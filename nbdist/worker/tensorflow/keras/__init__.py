"""Keras under MultiWorkerMirroredStrategy: `fit`, `evaluate` and `predict` as on one device."""
