"""What a resolver says the processes and devices are, against what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from nbdist.errors import StrategyError


@runtime_checkable
class ClusterResolver(Protocol):
    """TensorFlow's, as far as it is asked here."""

    task_id: int | None

    def cluster_spec(self) -> Any:
        """Gives a `ClusterSpec`, whose `as_dict()` has addresses by job."""
        ...


def check(resolver: object) -> None:
    """Compare with the live processes.

    Raises:
        StrategyError: they differ, or `resolver` is nothing that says what they are.
    """
    if isinstance(resolver, ClusterResolver):
        _check_tasks(resolver)
    elif isinstance(resolver, Mapping) and set(resolver) == {"hosts", "devices_per_host"}:
        _check_counts(resolver["hosts"], resolver["devices_per_host"])
    elif isinstance(resolver, Sequence) and len(resolver) == 2:
        _check_counts(*resolver)
    else:
        raise StrategyError(
            f"resolver={resolver!r} says nothing of hosts: give a tf.distribute.cluster_resolver, "
            '{"hosts": 4, "devices_per_host": 8} or (4, 8)'
        )


def _check_counts(hosts: Any, devices: Any) -> None:
    live = jax.process_count(), jax.local_device_count()
    if (hosts, devices) != live:
        raise StrategyError(
            f"the resolver says {hosts} hosts with {devices} devices each, and the live processes "
            f"are {live[0]} with {live[1]} each: type %dist_start {hosts} hosts "
            f"--devices-per-host {devices}"
            ", or leave the resolver out"
        )


def _check_tasks(resolver: ClusterResolver) -> None:
    jobs = resolver.cluster_spec().as_dict()
    tasks = max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))
    own = resolver.task_id or 0
    live = jax.process_count(), jax.process_index()
    if (tasks, own) != live:
        raise StrategyError(
            f"the resolver says {tasks} workers, of which this is {own}, and the live processes "
            f"are {live[0]}, of which this is {live[1]}: type %dist_start {tasks} hosts, "
            "or leave the resolver out"
        )
