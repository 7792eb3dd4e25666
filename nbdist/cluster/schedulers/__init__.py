"""Hosts from batch schedulers and Kubernetes: jobs, and their connections to the notebook."""
