"""Computation in a replica with the results of one device.

Weights of batch shares, random numbers, reductions and finite checks.
"""
