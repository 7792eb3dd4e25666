"""Expected time and memory of a step in one layout."""
