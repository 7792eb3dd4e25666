"""Assignment of ranks to hosts, and the environment, cores and address of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.cluster import environment, resources
from nbdist.errors import StartError
from nbdist.records import RANK_VARIABLE
from nbdist.utils.sockets import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.cluster.fleet import Fleet
    from nbdist.records import ClusterRequest


_TPU_REMEDY = (
    "\na TPU slice runs on all of its hosts, and none was started: log in on these hosts with ssh, "
    "and restart or recreate the TPU if they do not respond"
)


def _remedy(count: int) -> str:
    return f"\nuse --min-hosts {count} to start without them" if count else ""


class Places:
    """Places of the ranks. A place is a position in the list of requested hosts.

    A rank uses the GPUs and cores of its place. A restart may leave out lost hosts. There are then
    fewer ranks than places.

    Args:
        request: the request for the cluster.
        fleet: the fork servers of the hosts.

    Attributes:
        numbers: the place of each rank, in rank order.
    """

    def __init__(self, request: ClusterRequest, fleet: Fleet) -> None:
        self._fleet = fleet
        self.resize(request)

    def resize(self, request: ClusterRequest) -> None:
        """Change the requested hosts, with one rank at each place."""
        self._request = request
        self.numbers = tuple(range(len(request.hosts)))

    def reach(
        self,
        show_message: Callable[[str], None],
        *,
        leaves_out: bool,
        least: int = 0,
        waits: bool = True,
    ) -> str:
        """Connect to the hosts that are not connected.

        Args:
            show_message: receives progress messages.
            leaves_out: True to continue without hosts that cannot be reached.
            least: the smallest number of ranks to continue with, if the request sets no
                `--min-hosts`; 0 for all ranks.
            waits: True to wait in the queue of a scheduler.

        Returns:
            A description of the outcome.

        Raises:
            StartError: too few hosts can be reached.
        """
        reached = self._fleet.reach(show_message, waits=waits)
        lost = self._fleet.unreached if leaves_out else {}
        there = tuple(n for n in self.numbers if self._request.hosts[n].key not in lost)
        is_tpu = self._request.tpu is not None
        if lost and (is_tpu or not 0 < (self._request.min_hosts or least) <= len(there)):
            why = "\n".join(f"  {key}: {reason}" for key, reason in lost.items())
            verb = "used" if self._request.install else "reached"
            remedy = _TPU_REMEDY if is_tpu else _remedy(len(there))
            raise StartError(f"{len(lost)} of the hosts cannot be {verb}:\n{why}{remedy}")
        self.numbers = there
        return reached

    def host(self, rank: int) -> str:
        """Return the key of a rank's host."""
        return self._request.hosts[self.numbers[rank]].key

    def will_be_requeued(self, ranks: Sequence[int]) -> bool:
        """Return True if a scheduler provides the hosts of these ranks again; see `Fleet`."""
        return self._fleet.will_be_requeued({self.host(rank) for rank in ranks})

    def of_spare(self, number: int) -> str:
        """Return the key of a spare's host. Spares are assigned to hosts round-robin."""
        return self._request.hosts[number % len(self._request.hosts)].key

    def fitting(self, spares: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
        """Return the place of a spare on the same host for each rank that has one."""
        free, found = list(spares), {}
        for rank in ranks:
            host = self.host(rank)
            there = (s for s in free if self.of_spare(s - environment.FIRST_SPARE) == host)
            if (spare := next(there, None)) is not None:
                found[rank] = spare
                free.remove(spare)
        return found

    def address(self, rank: int) -> str:
        """Return the address to which other ranks connect."""
        return LOOPBACK if self._request.is_local else self._fleet.address(self.host(rank))

    def cpu_devices(self, rank: int) -> int:
        """Return the number of a rank's virtual CPU devices in JAX; 0 for JAX's default."""
        host = self._request.hosts[self.numbers[rank]]
        if self._fleet.gpus(host.key):
            return 0
        return host.devices or self._request.devices_per_host

    def own(self) -> list[tuple[str, dict[str, str], tuple[int, ...]]]:
        """Return the host key, the own environment variables and the cores of each rank."""
        envs = environment.of_places(self._request, self._fleet.gpus)
        each = self._request.cpus_per_worker
        return [
            (self.host(rank), {**envs[number], RANK_VARIABLE: str(rank)}, self._cores(number, each))
            for rank, number in enumerate(self.numbers)
        ]

    def _cores(self, number: int, each: int) -> tuple[int, ...]:
        """Return the cores that a place is pinned to; empty for no pinning."""
        keys = [host.key for host in self._request.hosts]
        before = keys[:number].count(keys[number])
        there = self._fleet.cores(keys[number])
        return resources.share_cores(there, before, each) if each and there else ()
