"""Computation in a replica with the numbers of one device.

Weights, random numbers, reductions, finite checks.
"""
