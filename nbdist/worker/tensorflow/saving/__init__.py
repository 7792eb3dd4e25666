"""Saves under MultiWorkerMirroredStrategy: rank 0 writes and the other ranks wait."""
