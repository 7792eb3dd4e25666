"""Views of where arrays are: text, HTML and PNG."""
