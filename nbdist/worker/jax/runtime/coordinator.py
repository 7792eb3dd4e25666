"""JAX's coordination service in a separate process without devices.

The process is a child of the fork server, beside the engines. The service and the other ranks
survive when a rank dies.
"""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

from jaxlib import _jax

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_TIMEOUT_S = 30
SHUTDOWN_TIMEOUT_S = 5
_ATTEMPTS = 5


def main(args: dict[str, Any], announce: Callable[[dict[str, Any]], None]) -> None:
    """Serve until killed.

    Args:
        args: `world_size`, the number of processes, and `host`, the address to listen on.
        announce: Receives `{"event": "coordinator", "address": "host:port"}` once ready.
    """
    service, address = _serve(args["host"], args["world_size"])
    announce({"event": "coordinator", "address": address})
    try:
        signal.pause()
    finally:
        service.shutdown()


def _serve(host: str, world_size: int) -> tuple[Any, str]:
    for attempt in range(_ATTEMPTS):
        address = f"{host}:{_free_port(host)}"
        try:
            service = _jax.get_distributed_runtime_service(
                address,
                world_size,
                heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
                shutdown_timeout=SHUTDOWN_TIMEOUT_S,
                recoverable=True,
            )
        except _jax.JaxRuntimeError:
            if attempt == _ATTEMPTS - 1:  # another process took the port each time
                raise
        else:
            return service, address
    raise AssertionError("unreachable")


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
