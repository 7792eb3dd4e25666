"""The preloaded process that forks the engines of a host, and its client in the notebook."""
