"""Fork servers of other hosts, and the connections to them: over ssh, or opened by a job."""
