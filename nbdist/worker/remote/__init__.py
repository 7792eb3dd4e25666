"""Functions that the notebook calls on an engine through ipyparallel's `apply`."""
