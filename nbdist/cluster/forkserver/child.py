"""Child of a fork server, with its own session and log.

A forked child calls `become` directly. If forking is unsafe, the fork server starts a new Python,
`python -m nbdist.cluster.forkserver.child FOLDER DESCRIPTOR`, which reads its command from standard
input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbdist.cluster.forkserver.logs import log_file
from nbdist.utils.signals import signal_at_end_of_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.forkserver.control_socket import Event


def become(command: Event, folder: Path, announce: Callable[[Event], None]) -> NoReturn:
    """Run the target of a `spawn` command, and exit with its status.

    Args:
        command: the command that the fork server received.
        folder: the cluster's folder.
        announce: sends an event to the owner of the fork server.
    """
    code = 1
    try:
        path = log_file(folder, command["id"])
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.update(command["env"])
        module, function = command["target"].split(":")
        getattr(importlib.import_module(module), function)(command["args"], announce)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the boundary of the process: the log shows it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent, the fork server, ends for any reason."""
    signal_at_end_of_parent(signal.SIGKILL)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    folder, descriptor = sys.argv[1:]
    command = json.load(sys.stdin)

    def announce(event: Event) -> None:
        os.write(int(descriptor), json.dumps(event).encode() + b"\n")

    become(command, Path(folder), announce)


if __name__ == "__main__":
    main()
