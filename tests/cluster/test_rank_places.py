"""Places of ranks: lost hosts, spares, and the environment, cores and address of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.environment import FIRST_SPARE
from nbdist.cluster.fleet import LOOPBACK
from nbdist.cluster.rank_places import Places
from nbdist.errors import StartError
from nbdist.records import ClusterRequest, Host

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Hosts:
    """Double of the fork servers of hosts.

    Attributes:
        unreached: reasons for the hosts that cannot be reached.
        all_gpus: GPUs by host.
        all_cores: cores by host.
        asked: hosts of the last question whether a scheduler provides them again.
    """

    def __init__(self) -> None:
        self.unreached: dict[str, str] = {}
        self.all_gpus: dict[str, tuple[str, ...]] = {}
        self.all_cores: dict[str, tuple[int, ...]] = {}
        self.asked: Collection[str] = ()

    def reach(self, show_message: Callable[[str], None], *, waits: bool) -> str:
        show_message(f"waits: {waits}")
        return "2 of 3"

    def will_be_requeued(self, keys: Collection[str]) -> bool:
        self.asked = keys
        return True

    def address(self, key: str) -> str:
        return f"address of {key}"

    def gpus(self, key: str) -> tuple[str, ...]:
        return self.all_gpus.get(key, ())

    def cores(self, key: str) -> tuple[int, ...]:
        return self.all_cores.get(key, ())


def new_places(fleet: Hosts, *names: str, **changes: object) -> Places:
    request = ClusterRequest(
        hosts=tuple(Host(name=name) for name in names),
        frameworks=("jax",),
        **changes,  # type: ignore[arg-type]
    )
    return Places(request, fleet)  # type: ignore[arg-type]


def reach(places: Places, **options: object) -> str:
    return places.reach(lambda _: None, **{"leaves_out": True, **options})  # type: ignore[arg-type]


@pytest.fixture
def fleet() -> Hosts:
    return Hosts()


def test_every_place_has_a_rank_at_the_start(fleet: Hosts) -> None:
    places = new_places(fleet, "a", "b", "a")
    assert places.numbers == (0, 1, 2)
    assert [places.host(rank) for rank in range(3)] == ["a", "b", "a"]
    places.resize(ClusterRequest(hosts=(Host(),), frameworks=()))
    assert places.numbers == (0,)


@pytest.mark.parametrize("waits", [True, False])
def test_messages_and_outcome_are_those_of_the_fork_servers(fleet: Hosts, waits: bool) -> None:
    shown: list[str] = []
    outcome = new_places(fleet, "a").reach(shown.append, leaves_out=True, waits=waits)
    assert (outcome, shown) == ("2 of 3", [f"waits: {waits}"])


def test_ranks_continue_without_lost_hosts_if_enough_remain(fleet: Hosts) -> None:
    places = new_places(fleet, "a", "b", "a", "c", min_hosts=2)
    fleet.unreached = {"a": "timed out"}
    assert reach(places) == "2 of 3"
    assert places.numbers == (1, 3)
    assert [places.host(rank) for rank in range(2)] == ["b", "c"]
    assert places.own()[1][1]["NBDIST_RANK"] == "1"
    fleet.unreached = {"a": "timed out", "b": "refused"}
    with pytest.raises(StartError) as error:
        reach(places)
    assert str(error.value) == (
        "2 of the hosts cannot be reached:\n  a: timed out\n  b: refused\n"
        "use --min-hosts 1 to start without them"
    )
    assert places.numbers == (1, 3)


def test_no_number_is_proposed_if_no_host_remains(fleet: Hosts) -> None:
    fleet.unreached = {"a": "timed out"}
    with pytest.raises(StartError, match=r"^1 of the hosts cannot be reached:\n  a: timed out$"):
        reach(new_places(fleet, "a", min_hosts=1))


@pytest.mark.parametrize(
    ("min_hosts", "least", "continues"),
    [(0, 0, False), (0, 2, True), (0, 3, False), (3, 2, False), (1, 3, True)],
)
def test_the_requested_minimum_has_precedence(
    fleet: Hosts, min_hosts: int, least: int, continues: bool
) -> None:
    fleet.unreached = {"c": "timed out"}
    places = new_places(fleet, "a", "b", "c", min_hosts=min_hosts)
    if continues:
        reach(places, least=least)
        assert places.numbers == (0, 1)
    else:
        with pytest.raises(StartError, match="cannot be reached"):
            reach(places, least=least)


def test_lost_hosts_keep_their_ranks_if_none_may_be_left_out(fleet: Hosts) -> None:
    fleet.unreached = {"a": "timed out"}
    places = new_places(fleet, "a", "b")
    reach(places, leaves_out=False)
    assert places.numbers == (0, 1)


def test_a_scheduler_is_asked_for_each_host_once(fleet: Hosts) -> None:
    places = new_places(fleet, "a", "b", "a")
    assert places.will_be_requeued([0, 2])
    assert fleet.asked == {"a"}


def test_spares_are_on_hosts_in_turn_and_replace_ranks_of_their_host(fleet: Hosts) -> None:
    places = new_places(fleet, "a", "b", "c")
    assert [places.of_spare(number) for number in range(4)] == ["a", "b", "c", "a"]
    spares = [FIRST_SPARE + number for number in range(4)]
    assert places.fitting(spares, [0, 1]) == {0: spares[0], 1: spares[1]}
    assert places.fitting(spares[1:], [0]) == {0: spares[3]}
    assert places.fitting(spares[1:3], [0]) == {}
    both = new_places(fleet, "a", "a")
    assert both.fitting(spares[:1], [0, 1]) == {0: spares[0]}  # one spare for one rank
    assert spares == [FIRST_SPARE + number for number in range(4)]


def test_ranks_on_one_machine_connect_over_loopback(fleet: Hosts) -> None:
    assert new_places(fleet, "", "").address(0) == LOOPBACK
    mixed = new_places(fleet, "", "a")
    assert [mixed.address(rank) for rank in range(2)] == ["address of ", "address of a"]


def test_hosts_without_gpus_have_virtual_devices(fleet: Hosts) -> None:
    hosts = (Host(name="a", devices=4), Host(name="b"), Host(name="gpu"))
    request = ClusterRequest(hosts=hosts, frameworks=("jax",), devices_per_host=2)
    fleet.all_gpus = {"gpu": ("0",)}
    places = Places(request, fleet)  # type: ignore[arg-type]
    assert [places.cpu_devices(rank) for rank in range(3)] == [4, 2, 0]
    places.numbers = (1, 2)
    assert [places.cpu_devices(rank) for rank in range(2)] == [2, 0]


def test_each_rank_has_the_gpus_and_cores_of_its_place(fleet: Hosts) -> None:
    fleet.all_gpus = {"a": ("0", "1")}
    fleet.all_cores = {"a": (0, 2, 4, 6), "b": (1, 3)}
    places = new_places(fleet, "a", "b", "a", "c", cpus_per_worker=2)
    places.numbers = (1, 2, 3)
    gpu = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert places.own() == [
        ("b", {"NBDIST_RANK": "0"}, (1, 3)),
        ("a", {"NBDIST_RANK": "1", **gpu}, (4, 6)),
        ("c", {"NBDIST_RANK": "2"}, ()),
    ]


def test_ranks_are_pinned_to_cores_only_on_request(fleet: Hosts) -> None:
    fleet.all_cores = {"a": (0, 1)}
    assert new_places(fleet, "a").own()[0][2] == ()


def test_hosts_with_too_few_gpus_are_refused_together(fleet: Hosts) -> None:
    hosts = (Host(name="a", devices=4), Host(name="b", devices=2), Host(name="b", devices=1))
    request = ClusterRequest(hosts=hosts, frameworks=("jax",))
    places = Places(request, fleet)  # type: ignore[arg-type]
    fleet.all_gpus = {"a": ("0", "3"), "b": ("0", "1")}
    with pytest.raises(StartError) as error:
        places.own()
    assert str(error.value) == (
        "a: its worker needs 4 GPUs, and 2 are visible there (0, 3): request at most 2\n"
        "b: 2 workers need 3 GPUs, and 2 are visible there (0, 1): request at most 2"
    )
    fleet.all_gpus = {"a": ("0", "3", "5", "6"), "b": ("0", "1", "2")}
    visible = [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in places.own()]
    assert visible == ["0,3,5,6", "0,1", "2"]


def test_a_worker_uses_one_slice(fleet: Hosts) -> None:
    request = ClusterRequest(hosts=(Host(name="a", devices=2),), frameworks=("jax",))
    places = Places(request, fleet)  # type: ignore[arg-type]
    fleet.all_gpus = {"a": ("MIG-1", "MIG-2")}
    with pytest.raises(StartError, match=r"a: a worker uses one MIG slice, .* as in a:1 a:1"):
        places.own()
