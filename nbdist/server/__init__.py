"""Jupyter server extension: lists runs and clusters, and sends runs to browsers as they grow.

Only the Jupyter server imports this package.
"""

from nbdist.server.extension import _jupyter_server_extension_points, _load_jupyter_server_extension

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]
