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
    service, address = serve(args["host"], args["world_size"])
    announce({"event": "coordinator", "address": address})
    try:
        signal.pause()
    finally:
        service.shutdown()


def serve(host: str, world_size: int, port: int = 0) -> tuple[Any, str]:
    """Start the service in this process.

    Args:
        host: address to listen on.
        world_size: number of processes.
        port: port to listen on; 0 for a free one.

    Returns:
        The service and its address, `host:port`.

    Raises:
        JaxRuntimeError: another process uses the port.
    """
    for attempt in range(_ATTEMPTS):
        address = f"{host}:{port or _free_port(host)}"
        try:
            service = _jax.get_distributed_runtime_service(
                address,
                world_size,
                heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
                shutdown_timeout=SHUTDOWN_TIMEOUT_S,
                recoverable=True,
            )
        except _jax.JaxRuntimeError:
            if port or attempt == _ATTEMPTS - 1:  # another process took the port each time
                raise
        else:
            return service, address
    raise AssertionError("unreachable")


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
