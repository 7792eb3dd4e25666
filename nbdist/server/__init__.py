"""What the Jupyter server does: lists runs and clusters, and shows runs to browsers as they go.

Only the server imports this.
"""

from nbdist.server.extension import _jupyter_server_extension_points, _load_jupyter_server_extension

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]
