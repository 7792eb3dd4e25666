"""Check of a cluster resolver against the live processes and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from nbdist.errors import StrategyError


@runtime_checkable
class ClusterResolver(Protocol):
    """The part of TensorFlow's `ClusterResolver` that nbdist uses."""

    task_id: int | None

    def cluster_spec(self) -> Any:
        """Return a `ClusterSpec`; its `as_dict()` maps jobs to addresses."""
        ...


def check(resolver: object) -> None:
    """Compare a resolver with the live processes.

    Raises:
        StrategyError: They differ, or `resolver` has an unsupported type.
    """
    if isinstance(resolver, ClusterResolver):
        _check_tasks(resolver)
    elif isinstance(resolver, Mapping) and set(resolver) == {"hosts", "devices_per_host"}:
        _check_counts(resolver["hosts"], resolver["devices_per_host"])
    elif isinstance(resolver, Sequence) and len(resolver) == 2:
        _check_counts(*resolver)
    else:
        raise StrategyError(
            f"resolver={resolver!r} specifies no hosts: pass a tf.distribute.cluster_resolver, "
            '{"hosts": 4, "devices_per_host": 8} or (4, 8)'
        )


def _check_counts(hosts: Any, devices: Any) -> None:
    live = jax.process_count(), jax.local_device_count()
    if (hosts, devices) != live:
        raise StrategyError(
            f"the resolver specifies {hosts} hosts with {devices} devices each, but {live[0]} "
            f"processes with {live[1]} devices each are live: run %dist_start {hosts} hosts "
            f"--devices-per-host {devices}"
            ", or omit the resolver"
        )


def _check_tasks(resolver: ClusterResolver) -> None:
    jobs = resolver.cluster_spec().as_dict()
    tasks = max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))
    own = resolver.task_id or 0
    live = jax.process_count(), jax.process_index()
    if (tasks, own) != live:
        raise StrategyError(
            f"the resolver specifies {tasks} workers and index {own}, but {live[0]} processes are "
            f"live, and this one has index {live[1]}: run %dist_start {tasks} hosts, "
            "or omit the resolver"
        )
