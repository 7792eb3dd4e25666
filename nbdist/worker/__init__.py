"""Code that runs on an engine."""
