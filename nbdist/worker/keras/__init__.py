"""Keras on either backend: its choice, optimizers, HDF5 files and the timing of train functions."""
