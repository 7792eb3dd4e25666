"""Reports of ranks on their way into files, tables and diagnostics. Reading of recorded runs."""
