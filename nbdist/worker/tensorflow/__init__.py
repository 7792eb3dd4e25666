"""TensorFlow on a rank: MultiWorkerMirroredStrategy and its step cells."""
