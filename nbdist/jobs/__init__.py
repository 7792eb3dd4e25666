"""Programs made from cells of a notebook, and their start on this machine."""
