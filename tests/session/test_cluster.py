"""Parameters of `Cluster`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING

from msgspec import structs

from nbdist.records import ClusterRequest
from nbdist.session.cluster import Cluster
from nbdist.session.lifecycle import ClusterLifecycle

if TYPE_CHECKING:
    import pytest

REQUIRED = {"hosts", "frameworks"}
"""Fields of a request without a default."""

NORMALIZED = {"env": None, "seed": None, "sync": True}
"""Parameters whose value `Cluster` replaces: by no variables, a random seed, and `Sync()`."""


def test_defaults_are_those_of_the_request() -> None:
    parameters = inspect.signature(Cluster).parameters
    expected = {
        field.name: field.default
        for field in structs.fields(ClusterRequest)
        if field.name not in REQUIRED
    }
    assert {name: parameters[name].default for name in expected} == expected | NORMALIZED


def test_a_call_without_options_requests_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle = SimpleNamespace(
        folder=None, worker_group=None, runner=SimpleNamespace(), journal=None
    )
    monkeypatch.setattr(ClusterLifecycle, "start", lambda _request, _settings: lifecycle)
    first, second = (Cluster(1, framework="none").request for _ in range(2))
    assert first == ClusterRequest(hosts=first.hosts, frameworks=(), seed=first.seed)
    assert first.seed != second.seed
