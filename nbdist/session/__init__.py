"""`Cluster`, the Python API: its lifecycle, discovery and inspection."""
