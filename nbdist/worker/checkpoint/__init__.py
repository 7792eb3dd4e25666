"""Checkpoint folders, and saving and restoring the state of a run."""
