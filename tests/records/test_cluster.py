"""Hosts and sockets of a cluster."""

from __future__ import annotations

import pytest

from nbdist.records import BoundSocket, ClusterRequest, Host, SocketAddress, WorkerState
from nbdist.records.cluster import strategies_of


@pytest.mark.parametrize(
    ("host", "key"),
    [
        (Host(), ""),
        (Host(user="me", port=22), ""),
        (Host(name="gpu1"), "gpu1"),
        (Host(name="gpu1", user="me"), "me@gpu1"),
        (Host(name="gpu1", port=2222), "gpu1:2222"),
        (Host(name="gpu1", user="me", port=2222, devices=8), "me@gpu1:2222"),
    ],
)
def test_a_host_is_known_by_user_name_and_port(host: Host, key: str) -> None:
    assert host.key == key


def test_a_cluster_is_local_without_named_hosts() -> None:
    def request(*hosts: Host) -> ClusterRequest:
        return ClusterRequest(hosts=hosts, frameworks=())

    assert request().is_local
    assert request(Host(), Host(devices=2)).is_local
    assert not request(Host(), Host(name="gpu1")).is_local


def test_each_framework_has_a_strategy() -> None:
    request = ClusterRequest(hosts=(Host(),), frameworks=("jax", "tensorflow"))
    assert strategies_of(request) == ("pjrt", "mirrored")
    assert strategies_of(ClusterRequest(hosts=(), frameworks=())) == ()


def test_a_socket_is_on_the_loopback_interface() -> None:
    bound = BoundSocket(port=5, public_key=b"public", secret_key=b"secret")
    assert bound.address == SocketAddress(url="tcp://127.0.0.1:5", server_key=b"public")


def test_a_worker_is_labelled_by_rank_and_host() -> None:
    assert WorkerState(rank=3, host="a", pid=1, versions={}, devices=()).where == "3@a"
