"""The coordination service, and versions of JAX without recoverable processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbdist.errors import StartError
from nbdist.worker.jax.runtime import coordinator


def test_process_may_join_again_in_place_of_a_dead_one() -> None:
    service, address = coordinator.serve("127.0.0.1", 1)
    try:
        for _ in range(2):
            client = coordinator.connect(address, 0, 10)
            client.key_value_set("rank", "0", allow_overwrite=True)
            assert client.blocking_key_value_get("rank", 5000) == "0"
            del client  # without a shutdown, like a process that dies
    finally:
        service.shutdown()


def test_jax_without_recoverable_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a JAX whose service and client lack the option."""

    def maker(address: str, number: int, **options: object) -> None:
        """Accept other options: heartbeat_timeout, shutdown_timeout."""

    other = SimpleNamespace(
        get_distributed_runtime_service=maker, get_distributed_runtime_client=maker
    )
    monkeypatch.setattr(coordinator, "_jax", other)
    with pytest.raises(StartError, match=r"JAX 0\..* no option 'recoverable' .*: use JAX 0.8 to"):
        coordinator.serve("127.0.0.1", 1)
    with pytest.raises(StartError, match="no option 'recoverable'"):
        coordinator.connect("127.0.0.1:1", 0, 1)
