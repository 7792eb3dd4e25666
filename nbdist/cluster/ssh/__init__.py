"""Connections to other hosts over ssh, and the fork servers there."""
