"""Engines, controller, collectives, heartbeats.

How the workers of a cluster start, connect and end.
"""
