"""`autoplace`: measure where a jitted function runs fastest, and store the choice."""
