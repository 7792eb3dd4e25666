"""TensorBoard on the stored runs behind the Jupyter server, through jupyter-server-proxy."""

from __future__ import annotations

from nbdist.settings import Settings
from nbdist.telemetry.board_command import board_command


def server_process() -> dict[str, object]:
    """Return the description of the process for jupyter-server-proxy.

    It calls this entry point when the Jupyter server starts, starts the process with the first
    request for `<base URL>/nbdist-tensorboard/`, and ends it with the server.
    """
    settings = Settings.from_environment()
    command = board_command(settings.runs_path, "PORT")
    braces = str.maketrans({"{": "{{", "}": "}}"})  # jupyter-server-proxy formats each argument
    return {
        "command": [{"PORT": "{port}"}.get(part, part.translate(braces)) for part in command],
        "timeout": settings.start_timeout_s,
        "launcher_entry": {"enabled": False},  # the commands of the extension open it
    }
