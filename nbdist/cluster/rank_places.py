"""Where each rank is, and what it has there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster import environment, resources
from nbdist.cluster.fleet import LOOPBACK
from nbdist.errors import StartError
from nbdist.records import RANK_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.fleet import Fleet
    from nbdist.records import ClusterRequest


class Places:
    """The places of the ranks, among the hosts that were asked for.

    What a rank has of a machine is its place's. Those who begin anew may be fewer.

    Args:
        request: what was asked for.
        fleet: knows the hosts.

    Attributes:
        numbers: of each rank's place, in the order of ranks.
    """

    def __init__(self, request: ClusterRequest, fleet: Fleet) -> None:
        self._fleet = fleet
        self.resize(request)

    def resize(self, request: ClusterRequest) -> None:
        """Other hosts are asked for; each is a rank's place."""
        self._request = request
        self.numbers = tuple(range(len(request.hosts)))

    def reach(
        self,
        say: Callable[[str], None],
        *,
        leaves_out: bool,
        least: int = 0,
        waits: bool = True,
    ) -> str:
        """Connect to the hosts that are not connected.

        Args:
            say: is told how it goes.
            leaves_out: there is no rank on those that cannot be reached, if that is allowed.
            least: so many ranks do, where no other number was asked for; 0 for all of them.
            waits: for a scheduler.

        Returns:
            What came of it, in words.

        Raises:
            StartError: more hosts are needed.
        """
        reached = self._fleet.reach(say, waits=waits)
        lost = self._fleet.unreached if leaves_out else {}
        there = tuple(n for n in self.numbers if self._request.hosts[n].key not in lost)
        if lost and not 0 < (self._request.min_hosts or least) <= len(there):
            why = "\n".join(f"  {key}: {reason}" for key, reason in lost.items())
            without = f"\ntype --min-hosts {len(there)} to start without" if there else ""
            raise StartError(f"{len(lost)} of the hosts cannot be reached:\n{why}{without}")
        self.numbers = there
        return reached

    def host(self, rank: int) -> str:
        """The key of the host that a rank is on."""
        return self._request.hosts[self.numbers[rank]].key

    def are_given_again(self, ranks: Sequence[int]) -> bool:
        """See `Fleet.are_given_again`."""
        return self._fleet.are_given_again({self.host(rank) for rank in ranks})

    def of_spare(self, number: int) -> str:
        """The key of the host that a spare is on: they are dealt in turn."""
        return self._request.hosts[number % len(self._request.hosts)].key

    def fitting(self, spares: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
        """A spare for each rank, by the place that it says it has, as far as one is on its host."""
        free, found = list(spares), {}
        for rank in ranks:
            host = self.host(rank)
            there = (s for s in free if self.of_spare(s - environment.FIRST_SPARE) == host)
            if (spare := next(there, None)) is not None:
                found[rank] = spare
                free.remove(spare)
        return found

    def address(self, rank: int) -> str:
        """To which other ranks connect."""
        return LOOPBACK if self._request.is_local else self._fleet.address(self.host(rank))

    def cpu_devices(self, rank: int) -> int:
        """How many virtual ones a rank has under JAX; 0 leaves it to that."""
        host = self._request.hosts[self.numbers[rank]]
        if self._fleet.gpus(host.key):
            return 0
        return host.devices or self._request.devices_per_host

    def own(self) -> list[tuple[str, dict[str, str], tuple[int, ...]]]:
        """Of each rank: its host's key, the environment that it has by itself, its cores."""
        envs = environment.of_places(self._request, self._fleet.gpus)
        each = self._request.cpus_per_worker
        return [
            (self.host(rank), {**envs[number], RANK_VARIABLE: str(rank)}, self._cores(number, each))
            for rank, number in enumerate(self.numbers)
        ]

    def _cores(self, number: int, each: int) -> tuple[int, ...]:
        """Those that a place stays on: the places of a host are dealt its cores in turn."""
        keys = [host.key for host in self._request.hosts]
        before = keys[:number].count(keys[number])
        there = self._fleet.cores(keys[number])
        return resources.share_cores(there, before, each) if each and there else ()
