from __future__ import annotations

from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.planner.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    send_s,
)
from nbdist.planner.hardware.efficiency import PYTORCH_A100, calibration_of
from nbdist.records.topology import Level, Topology
from tests.planner.machines import A100, HOST, HOSTS, NETWORK, TORUS, V5E

BYTES = st.floats(0, 1e11)
SIZES = st.integers(1, 16)
EXTENTS = st.tuples(SIZES, SIZES)
ALL = (all_reduce_s, reduce_scatter_s, all_gather_s, all_to_all_s)
COLLECTIVES = st.sampled_from(ALL)
MACHINES = st.sampled_from(
    [(HOSTS, PYTORCH_A100), (HOSTS, calibration_of(A100)), (TORUS, calibration_of(V5E))]
)
ROUNDING = 1 + 1e-9


@given(COLLECTIVES, BYTES, BYTES, EXTENTS, MACHINES)
def test_more_bytes_are_never_faster(collective, few, more, extent, machine) -> None:
    seconds = collective(few, extent, *machine)
    assert 0 <= seconds <= collective(few + more, extent, *machine) * ROUNDING


@given(COLLECTIVES, BYTES, MACHINES)
def test_axis_of_one_device_sends_nothing(collective, nbytes, machine) -> None:
    assert collective(nbytes, (1, 1), *machine) == 0


@given(BYTES, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), MACHINES)
def test_all_reduce_over_more_devices_is_never_cheaper(
    nbytes, inside, outside, more, machine
) -> None:
    def seconds(*extent: int) -> float:
        return all_reduce_s(nbytes, extent, *machine)

    assert seconds(inside, 1) <= seconds(inside + more, 1) * ROUNDING
    assert seconds(1, outside) <= seconds(1, outside + more) * ROUNDING
    assert seconds(inside, outside) <= seconds(inside, outside + more) * ROUNDING


@given(BYTES, EXTENTS)
def test_all_reduce_is_never_faster_than_slowest_link(nbytes, extent) -> None:
    """Each device link carries its share of the 2 (h - 1)/h traffic between hosts."""
    inside, hosts = extent
    share = 2 * (hosts - 1) / hosts * nbytes / inside
    seconds = all_reduce_s(nbytes, extent, HOSTS, PYTORCH_A100)
    assert seconds >= share / NETWORK.bytes_per_s
    assert seconds >= 2 * (inside - 1) / inside * nbytes / HOST.bytes_per_s * (hosts == 1)


@given(st.floats(1e6, 1e11), st.integers(2, 16), st.integers(2, 16))
def test_outer_level_carries_a_share_of_the_bytes(nbytes, inside, outside) -> None:
    calibration = calibration_of(V5E)
    both = all_reduce_s(nbytes, (inside, outside), TORUS, calibration)
    inner = all_reduce_s(nbytes, (inside, 1), TORUS, calibration)
    outer = all_reduce_s(nbytes / inside, (1, outside), TORUS, calibration)
    assert both == pytest.approx(inner + outer - calibration.collective_s)


@given(BYTES, EXTENTS, MACHINES)
def test_all_reduce_costs_at_most_a_scatter_and_a_gather(nbytes, extent, machine) -> None:
    topology, calibration = machine
    halves = reduce_scatter_s(nbytes, extent, topology, calibration)
    halves += all_gather_s(nbytes, extent, topology, calibration)
    launch_s = calibration.collective_s if prod(extent) > 1 else 0
    assert all_reduce_s(nbytes, extent, topology, calibration) <= (halves - launch_s) * ROUNDING


@given(BYTES, st.integers(2, 64))
def test_open_ring_is_slower_than_closed_ring(nbytes, size) -> None:
    closed = Topology(chip=V5E, levels=(TORUS.levels[0],))
    line = msgspec.structs.replace(TORUS.levels[0], wraps=False)
    open_ = Topology(chip=V5E, levels=(line,))
    for collective in ALL:
        slow = collective(nbytes, (size,), open_, calibration_of(V5E))
        assert collective(nbytes, (size,), closed, calibration_of(V5E)) <= slow * ROUNDING


def test_all_to_all_on_closed_ring_moves_an_eighth_each_way() -> None:
    calibration = msgspec.structs.replace(
        calibration_of(V5E), collective_s=0.0, link_efficiency=1.0
    )
    link = msgspec.structs.replace(TORUS.levels[0], latency_s=0.0)
    seconds = all_to_all_s(1e9, (16,), Topology(chip=V5E, levels=(link,)), calibration)
    assert seconds == pytest.approx(1e9 * 16 / 8 / link.bytes_per_s)


def test_few_bytes_use_trees_and_many_use_rings() -> None:
    def messages_s(hosts: int) -> float:
        return all_reduce_s(0, (1, hosts), HOSTS, PYTORCH_A100) - PYTORCH_A100.collective_s

    assert messages_s(64) == pytest.approx(2 * 6 * NETWORK.latency_s)
    bare = all_reduce_s(1e10, (1, 64), HOSTS, PYTORCH_A100)
    rate = NETWORK.bytes_per_s * PYTORCH_A100.network_efficiency
    local = PYTORCH_A100.local_passes * 1e10 / A100.bytes_per_s
    assert bare == pytest.approx(2 * 63 / 64 * 1e10 / rate + local, rel=0.01)


def test_nvlink_rack_is_faster_than_network() -> None:
    rack = Level(name="rack", size=9, latency_s=3.4e-6, bytes_per_s=300e9)
    racked = Topology(chip=A100, levels=(HOST, rack))
    inside = all_reduce_s(1e9, (8, 9), racked, PYTORCH_A100)
    assert inside < all_reduce_s(1e9, (8, 9), HOSTS, PYTORCH_A100)


@given(BYTES, BYTES)
def test_send_costs_depend_on_link(few, more) -> None:
    near = send_s(few, 0, HOSTS, PYTORCH_A100)
    far = send_s(few, 1, HOSTS, PYTORCH_A100)
    assert near < far <= send_s(few + more, 1, HOSTS, PYTORCH_A100) * ROUNDING
    assert far >= few / NETWORK.bytes_per_s
