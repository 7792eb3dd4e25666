"""Exported programs: ranks that run without a notebook and without engines."""
