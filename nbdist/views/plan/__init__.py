"""Views of plans: text and HTML."""
