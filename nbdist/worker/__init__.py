"""What runs on an engine."""
