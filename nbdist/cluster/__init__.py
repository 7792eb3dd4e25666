"""The engines: started, wired, watched, ended."""
