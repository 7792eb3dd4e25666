"""JAX's coordination service in a separate process without devices, and its client.

The process is a child of the fork server, beside the engines. The service and the other ranks
survive when a rank dies, because its processes are recoverable: a new process may join in place of
a dead one. From JAX 0.9 on, the service receives this option. Up to JAX 0.8, each client does.
"""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

import jaxlib

from nbdist.errors import StartError
from nbdist.private_api.jax import _jax

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_TIMEOUT_S = 30
SHUTDOWN_TIMEOUT_S = 5
_ATTEMPTS = 5
_OPTION = "recoverable"


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
        StartError: this version of JAX has no recoverable processes.
    """
    options = _options_of(_jax.get_distributed_runtime_service)
    for attempt in range(_ATTEMPTS):
        address = f"{host}:{port or _free_port(host)}"
        try:
            service = _jax.get_distributed_runtime_service(
                address,
                world_size,
                heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
                shutdown_timeout=SHUTDOWN_TIMEOUT_S,
                **options,
            )
        except _jax.JaxRuntimeError:
            if port or attempt == _ATTEMPTS - 1:  # another process took the port each time
                raise
        else:
            return service, address
    raise AssertionError("unreachable")


def connect(address: str, rank: int, timeout_s: int) -> Any:
    """Join the service as the process of a rank.

    Args:
        address: address of the service, `host:port`.
        rank: number of this process.
        timeout_s: limit until all processes have joined (seconds).

    Returns:
        JAX's client of the service.

    Raises:
        JaxRuntimeError: the service did not respond, or a process is missing.
        StartError: this version of JAX has no recoverable processes.
    """
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=timeout_s,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        use_compression=True,
        shutdown_on_destruction=False,
        **_options_of(_jax.get_distributed_runtime_client),
    )
    client.connect()
    return client


def _options_of(function: Any) -> dict[str, bool]:
    """Return the option for recoverable processes, if this function of JAX has it.

    Raises:
        StartError: neither the service nor its client has the option.
    """
    makers = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    if not any(_OPTION in (maker.__doc__ or "") for maker in makers):
        raise StartError(
            f"JAX {jaxlib.__version__} has no option {_OPTION!r} for its coordination service, so "
            "that a dead worker would end all others: use JAX 0.8 to 0.12 for the pjrt strategy"
        )
    return {_OPTION: True} if _OPTION in (function.__doc__ or "") else {}


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
