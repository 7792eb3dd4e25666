"""The training loop of step cells for both frameworks, and the checks around it."""
