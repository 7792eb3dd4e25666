"""The model of a training step: arrays, dimensions, operations, layers, and the legal layouts."""
