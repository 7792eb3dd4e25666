"""Rewriting a step with a scan over layers as a pipeline of stages."""
