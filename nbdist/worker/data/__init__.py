"""Input data of a step cell: sources, global batches, shards of each rank, padding, prefetching."""
