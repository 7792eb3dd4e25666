"""Text, HTML and pictures that a person sees."""
