"""Collectives, datasets and variables of TensorFlow on one rank, without Keras."""
