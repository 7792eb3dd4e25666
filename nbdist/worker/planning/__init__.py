"""Plan a step for the devices of the cluster, and compile it to check the plan."""
