"""Views of array placement: text, HTML and PNG."""
