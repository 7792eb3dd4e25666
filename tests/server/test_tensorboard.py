"""TensorBoard behind the Jupyter server. `tests/browser/test_run_tab.py` opens it in JupyterLab."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from jupyter_server_proxy.config import ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_entry_point_describes_a_process_on_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs {of} me"
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(folder))
    (found,) = entry_points(group="jupyter_serverproxy_servers", name="nbdist-tensorboard")
    process = ServerProcess(name=found.name, **found.load()())
    command = [part.format(port=4321, base_url="/", unix_socket="") for part in process.command]
    assert command[command.index("--logdir") + 1] == str(folder)
    assert command[command.index("--port") + 1] == "4321"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert not process.launcher_entry.enabled
