"""Helpers for files, processes, sockets and signals of the operating system.

They know nothing of clusters or cells.
"""
