"""What nbdist costs, each time beside a peer in the same run: `python -m benchmarks NAME`."""
