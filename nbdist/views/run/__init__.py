"""Views of a running cell and of recorded runs."""
