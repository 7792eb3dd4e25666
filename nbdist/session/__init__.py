"""`Cluster`: the plain Python API, its lifecycle, discovery and inspection."""
