"""The state and services of one rank: reports, output, interrupts, memory, random generators."""
