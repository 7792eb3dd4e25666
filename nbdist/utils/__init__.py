"""Helpers for files, processes, sockets and signals, without knowledge of clusters or cells."""
