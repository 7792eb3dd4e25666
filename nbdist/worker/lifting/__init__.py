"""Training loops of plain cells that nbdist runs as steps over all replicas."""
