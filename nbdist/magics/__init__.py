"""IPython magics: options, completion, and the call into the session."""
