"""Fork server: a process with preloaded modules that forks engines, and its client."""
