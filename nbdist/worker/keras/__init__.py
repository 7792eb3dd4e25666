"""Keras on either backend: choice, optimizers, HDF5 files, and timing of train functions."""
