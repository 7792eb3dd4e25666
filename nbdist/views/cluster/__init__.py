"""Views of hosts, workers, devices and restored collectives."""
