"""Benchmarks of nbdist against a peer in the same run: `python -m benchmarks NAME`."""
