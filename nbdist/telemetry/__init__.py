"""What the ranks say, on its way to the notebook."""
