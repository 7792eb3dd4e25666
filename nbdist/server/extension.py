"""How the Jupyter server takes us in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_runtime_dir
from jupyter_server.utils import url_path_join

from nbdist.server.handlers import ClustersHandler, PlacementHandler, RunsHandler
from nbdist.server.run_socket import LiveRunHandler
from nbdist.settings import Settings

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "nbdist.server"}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    """Add our addresses; the server takes care of who may use them."""
    base = url_path_join(app.web_app.settings["base_url"], "nbdist")
    runs = {"root": Settings.from_environment().runs_path}
    clusters = {"folder": Path(jupyter_runtime_dir()) / "nbdist"}
    app.web_app.add_handlers(  # type: ignore[no-untyped-call]
        ".*$",
        [
            (url_path_join(base, "runs"), RunsHandler, runs),
            (url_path_join(base, "clusters"), ClustersHandler, clusters),
            (url_path_join(base, "clusters", "([^/]+)", "placement"), PlacementHandler, clusters),
            (url_path_join(base, "runs", "([^/]+)", "live"), LiveRunHandler, runs),
        ],
    )
