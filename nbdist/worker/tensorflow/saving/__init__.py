"""Saves under MultiWorkerMirroredStrategy: rank 0 writes, the other ranks wait."""
