"""Planning a step on the devices of the cluster, and compiling it to check the plan."""
