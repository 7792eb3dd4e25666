"""Cell text on its way to a request that a rank can run.

Options, names, step programs, dependencies.
"""
