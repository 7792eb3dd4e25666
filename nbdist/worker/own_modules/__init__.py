"""The user's own modules, with the text that the notebook has sent."""
