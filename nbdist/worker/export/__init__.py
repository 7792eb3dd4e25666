"""Trained models and arrays as files for other programs."""
