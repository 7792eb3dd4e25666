"""Search for the best layout of a step on a topology, and the reasons if none exists."""
