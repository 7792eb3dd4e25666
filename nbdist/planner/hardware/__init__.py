"""Chips, links and topologies, with their measured or assumed efficiency."""
