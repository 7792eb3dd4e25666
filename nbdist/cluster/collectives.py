"""Connection of the collectives of a cluster's frameworks, and their restoration."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from nbdist.cluster.variable_pairing import agree
from nbdist.errors import ClosedError, WorkerError
from nbdist.records import CollectiveLedger, MirroredWiring, PjrtWiring
from nbdist.records.cluster import strategies_of
from nbdist.views import formatting
from nbdist.worker.remote import setup as engine_setup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from nbdist.cluster.engines import Engines
    from nbdist.records import (
        Bench,
        CellEnded,
        ClusterRequest,
        CollectiveState,
        Communication,
        Device,
        Restored,
        StrategyName,
    )
    from nbdist.views.cluster.workers import StartView

    Places = Callable[[Iterable[str]], str]


RESTORED: dict[StrategyName, str] = {
    "mirrored": (
        "nbdist restores TensorFlow's collectives before the next cell, and keeps variables, "
        "models and datasets"
    ),
    "pjrt": "nbdist restores JAX's collectives before the next cell, and keeps its arrays",
}
"""Message about cancelled collectives, by strategy."""

MAX_RECOVERIES_IN_PLACE = 10
"""Limit on the number of times that JAX reconnects in the same processes.

Each time, a surviving rank may keep objects of the cancelled step. They keep a connection to the
old coordinator, whose process must then continue to run.
"""

CLOSED = (
    "TensorFlow's collectives could not be restored ({}). nbdist starts fresh workers, without the "
    "objects of earlier cells: rerun the cells that create them"
)

_SETTLE_S = 1.0
"""Time to wait until no rank is in a collective any more."""

_POLL_S = 0.02


_LOST = (
    "without the variables and datasets of TensorFlow, because a worker was replaced: rerun the "
    "cells that create them"
)


class Collectives:
    """Collectives between the engines of one cluster.

    Args:
        request: the request for the cluster.
        engines: all engines of the cluster. Each operation needs all of them.

    Attributes:
        strategies: the strategies that are built.
        devices: the devices of each rank, of the framework that was connected last.
        broken: strategies whose collectives were cancelled. nbdist restores them before the next
            cell.
        unchecked: strategies whose collectives may be out of step after a cell.
        bench: measurements of JAX's devices; None if there are none.
    """

    def __init__(self, request: ClusterRequest, engines: Engines) -> None:
        self._request = request
        self._engines = engines
        self.strategies = strategies_of(request)
        self.devices: dict[int, tuple[Device, ...]] = {}
        self.broken: set[StrategyName] = set()
        self.unchecked: set[StrategyName] = set()
        self.bench: Bench | None = None
        self._recoveries = 0

    def ledger(self) -> CollectiveLedger:
        """Return the state that another process needs to take over the collectives."""
        return CollectiveLedger(
            devices=dict(self.devices),
            broken=tuple(self.broken),
            unchecked=tuple(self.unchecked),
            recoveries=self._recoveries,
            bench=self.bench,
        )

    def take_over(self, ledger: CollectiveLedger) -> None:
        """Use collectives that another process has connected."""
        self.devices, self.broken = dict(ledger.devices), set(ledger.broken)
        self.unchecked = set(ledger.unchecked)
        self._recoveries, self.bench = ledger.recoveries, ledger.bench

    def wire(self, phases: StartView) -> None:
        """Connect every framework of the cluster."""
        if "tensorflow" in self._request.frameworks:
            phases.run("collectives ready (TensorFlow)", self._wire_mirrored)
        if "jax" in self._request.frameworks:
            phases.run("collectives ready (JAX)", self._wire_pjrt)

    def check(self) -> None:
        """Mark as broken the collectives that are out of step between ranks after a cell.

        The next collective of a rank would meet a different one of the other ranks. The numbers
        would be wrong, or the ranks would wait forever.
        """
        self.unchecked -= self.broken
        deadline = time.monotonic() + _SETTLE_S
        while self.unchecked:
            states = self._engines.apply(engine_setup.collective_states, tuple(self.unchecked))
            is_late = time.monotonic() > deadline
            for strategy in tuple(self.unchecked):
                self._classify(strategy, [state[strategy] for state in states], is_late=is_late)
            if is_late:
                return
            time.sleep(_POLL_S * bool(self.unchecked))

    def _classify(
        self, strategy: StrategyName, states: Sequence[CollectiveState], *, is_late: bool
    ) -> None:
        """Mark a strategy as broken or as checked.

        If a long computation is under way on all ranks, the strategy stays unchecked until the
        next cell: the computation ends on all ranks.
        """
        under_way = [state.under_way for state in states]
        if len({state.keys for state in states}) > 1 or (is_late and len(set(under_way)) > 1):
            self.broken.add(strategy)
            self.unchecked.discard(strategy)
        elif not any(under_way):
            self.unchecked.discard(strategy)

    @property
    def recover_in_place(self) -> bool:
        """Return True if the remaining ranks may continue with replacements of the lost ones."""
        return self._recoveries < MAX_RECOVERIES_IN_PLACE

    def note(self, strategy: StrategyName | None, ended: Collection[CellEnded], ranks: int) -> None:
        """Mark the collectives that `check` compares before the next cell.

        Args:
            strategy: strategy of the cell; None if the cell did not run on all ranks.
            ended: results of the ranks, at the end of the cell.
            ranks: number of ranks that ran the cell.
        """
        is_of_all = strategy is not None and [end.status for end in ended] == ["ok"] * ranks
        if not is_of_all or len({end.collective_keys for end in ended}) > 1:
            self.unchecked.update(self.strategies)
        if strategy is not None and any(end.unfinished for end in ended):
            self.broken.add(strategy)

    def recover(self, phases: StartView) -> None:
        """Connect JAX again after ranks were replaced. TensorFlow's collectives are broken too."""
        self._recoveries += 1
        self.broken.update(self.strategies)
        self.rebuild(phases, {"pjrt"})

    def rebuild(
        self, phases: StartView, strategies: Collection[StrategyName], places: Places = lambda _: ""
    ) -> list[str]:
        """Restore the cancelled collectives of strategies, in the same processes.

        Args:
            phases: shows the progress.
            strategies: the strategies of the next cells.
            places: returns the cells that have bound given names.

        Returns:
            Messages for the user.

        Raises:
            ClosedError: TensorFlow's collectives cannot be restored. The workers must restart.
        """
        messages: list[str] = []
        if "mirrored" in self.broken.intersection(strategies):
            try:
                phases.run(
                    "collectives ready (TensorFlow)", lambda: messages.extend(self._reopen(places))
                )
            except WorkerError as error:
                raise ClosedError(CLOSED.format(error)) from error
            self.broken.discard("mirrored")
        if "pjrt" in self.broken.intersection(strategies):
            lost: set[str] = set()
            self._engines.apply(engine_setup.leave_pjrt)
            phases.run("collectives ready (JAX)", self._wire_pjrt)
            lost.update(*self._engines.apply(engine_setup.put_back_pjrt))
            self._engines.apply(engine_setup.forget, tuple(lost))
            used = set[int]().union(*self._engines.apply(engine_setup.peer_ports))
            self._engines.coordinators.end_unused(used)
            self.broken.discard("pjrt")
            messages += (
                [f"without {', '.join(f'`{name}`' for name in sorted(lost))}"] if lost else []
            )
        return messages

    def _reopen(self, places: Places) -> list[str]:
        """Restore TensorFlow's collectives in the same processes, with equal state on all ranks."""
        engines = self._engines
        asked = engines.apply(engine_setup.survey_mirrored)
        surveys = [survey for survey in asked if survey is not None]
        if len(surveys) < len(asked):
            self._wire_mirrored()
            return [_LOST]
        agreements = agree(surveys)
        engines.apply(engine_setup.reopen_mirrored, max(survey.next_key for survey in surveys))
        restored = engines.apply(engine_setup.restore_mirrored, agreements)
        return describe_restored(restored, agreements[0].source, places)

    def _wire_mirrored(self) -> str:
        ports = self._engines.apply(engine_setup.reserve_port)
        hosts = [self._engines.places.address(rank) for rank in range(len(ports))]
        hosts = [f"[{host}]" if ":" in host else host for host in hosts]
        addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        wired = mirrored_wiring(addresses, self._request.communication)
        devices = self._engines.apply(engine_setup.build_mirrored, wired)
        self.devices = dict(enumerate(devices))
        return f"MultiWorkerMirroredStrategy over {sum(map(len, devices))} replicas"

    def _wire_pjrt(self) -> str:
        engines = self._engines
        port = engines.coordinators.start(engines.world_size, engines.timeout_s)
        hosts = [engines.places.host(rank) for rank in range(engines.world_size)]
        wired = {
            rank: PjrtWiring(
                service=engines.fleet.service(host, port),
                address=engines.places.address(rank),
                rank=rank,
                world_size=engines.world_size,
                cpu_devices=engines.places.cpu_devices(rank),
                compiled=f"{engines.fleet.folder(host)}/compiled",
                bench=self.bench,
            )
            for rank, host in enumerate(hosts)
        }
        devices = self._engines.apply(engine_setup.build_pjrt, wired)
        self.devices = dict(enumerate(devices))
        workers = formatting.count(len(devices), "worker")
        return f"mesh of {formatting.count(sum(map(len, devices)), 'device')} over {workers}"


def mirrored_wiring(
    addresses: Sequence[str], communication: Communication
) -> dict[int, MirroredWiring]:
    """Build TF_CONFIG for every rank. Rank 0 is the chief.

    Args:
        addresses: host:port of each rank's TensorFlow server, in rank order.
        communication: the implementation of the collectives.

    Returns:
        The wiring of each rank.
    """
    cluster = {"worker": list(addresses)}
    return {
        rank: MirroredWiring(
            tf_config=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
            communication=communication,
        )
        for rank in range(len(addresses))
    }


def describe_restored(ranks: Sequence[Restored], source: int, places: Places) -> list[str]:
    """Describe the effects of a restoration on the variables and iterators of the ranks.

    Args:
        ranks: the result of each rank.
        source: the rank whose values all ranks have now.
        places: returns the cells that bound given names, as in `[3]`; empty if there are none.
    """
    messages = []
    changed = sorted({name for restored in ranks for name in restored.changed})
    if changed:
        messages.append(
            f"{_quoted(changed)} set to the values of rank {source}, because another rank was "
            "within a step"
        )
    for number, restored in enumerate(ranks):
        if restored.alone:
            messages.append(
                f"only rank {formatting.ranks([number])} has all variables of "
                f"{_quoted(restored.alone)}: {_rerun(restored.alone, places)}"
            )
    iterators = sorted({name for restored in ranks for name in restored.iterators})
    if iterators:
        messages.append(
            f"iterators may be at another element on each rank ({_quoted(iterators)}): "
            f"{_rerun(iterators, places)}"
        )
    return messages


def _rerun(names: Iterable[str], places: Places) -> str:
    cells = places(names)
    return f"run {f'cell {cells}' if cells else 'the cell that creates them'} again"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
