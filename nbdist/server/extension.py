"""Entry points of the Jupyter server extension."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_path, jupyter_runtime_dir
from jupyter_server.utils import url_path_join

from nbdist._version import __version__
from nbdist.server.documents import DocumentHandler, ExampleHandler
from nbdist.server.handlers import ClustersHandler, PlacementHandler, RunsHandler
from nbdist.server.run_handlers import (
    RunCellsHandler,
    RunCurveHandler,
    RunHandler,
    RunMediaHandler,
    RunStopHandler,
    RunTableHandler,
)
from nbdist.server.run_socket import LiveRunHandler, WorkerLogHandler
from nbdist.settings import Settings
from nbdist.telemetry.run_table import RunRows

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "nbdist.server"}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    """Add the handlers of nbdist. The server checks who may use them."""
    _check_labextension(app)
    base = url_path_join(app.web_app.settings["base_url"], "nbdist")
    root = Settings.from_environment().runs_path
    runs = {"root": root}
    table = RunRows(root, Path(app.root_dir))
    rows = {"rows": table}
    clusters = {"folder": Path(jupyter_runtime_dir()) / "nbdist"}
    app.web_app.add_handlers(  # type: ignore[no-untyped-call]
        ".*$",
        [
            (url_path_join(base, "runs"), RunsHandler, runs),
            (url_path_join(base, "runs", "table"), RunTableHandler, rows),
            (url_path_join(base, "runs", "([^/]+)"), RunHandler, runs),
            (url_path_join(base, "runs", "([^/]+)", "cells"), RunCellsHandler, runs),
            (url_path_join(base, "runs", "([^/]+)", "stop"), RunStopHandler, runs),
            (url_path_join(base, "runs", "([^/]+)", "curve"), RunCurveHandler, runs),
            (
                url_path_join(base, "runs", "([^/]+)", "media", "([0-9]{1,9})"),
                RunMediaHandler,
                runs,
            ),
            (url_path_join(base, "clusters"), ClustersHandler, clusters),
            (url_path_join(base, "clusters", "([^/]+)", "placement"), PlacementHandler, clusters),
            (url_path_join(base, "runs", "([^/]+)", "live"), LiveRunHandler, runs),
            (
                url_path_join(base, "clusters", "([^/]+)", "workers", "([0-9]{1,5})", "live"),
                WorkerLogHandler,
                {"root": clusters["folder"]},
            ),
            (url_path_join(base, "examples", "([^/]+)"), ExampleHandler),
            (url_path_join(base, "documents", "(.+)"), DocumentHandler),
        ],
    )
    # The first request for many runs would wait for all their files.
    threading.Thread(target=table.table, name="nbdist-runs", daemon=True).start()


def _check_labextension(app: ServerApp) -> None:
    """Log a warning if JupyterLab loads an extension of another version than this package."""
    for folder in jupyter_path("labextensions"):
        package = Path(folder) / "nbdist" / "package.json"
        try:
            found = json.loads(package.read_text(encoding="utf-8")).get("version")
        except (OSError, ValueError):
            continue
        if found != __version__:
            app.log.warning(
                "nbdist: the JupyterLab extension in %s has version %s, but the Python package has "
                "version %s. Remove that folder, install nbdist again in the environment of the "
                "Jupyter server, and reload the page.",
                package.parent,
                found,
                __version__,
            )
        return  # JupyterLab uses the first extension of a name
