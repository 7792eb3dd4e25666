"""What a process with JAX says of its devices, and where it puts data: a worker or a kernel."""
