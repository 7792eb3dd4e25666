"""Start, connection and end of the workers: engines, controller, collectives, heartbeats."""
