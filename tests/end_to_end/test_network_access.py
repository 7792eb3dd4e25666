"""A host in the same network without a key reads no data and runs no code."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.records import StepOptions
from tests.netns import Host, Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs_hosts, pytest.mark.usefixtures("own_folders")]

SECRET = "4a7c2e-the-word-that-nobody-else-reads"
STRANGER = """
import json, select, socket, sys, time, zmq
ends = [tuple(end) for end in json.loads(sys.argv[1])]
heard, sockets = b"", []
for end in ends:
    for greeting in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(64), b"\\xff" * 4096):
        try:
            link = socket.create_connection(end, 2)
            link.sendall(greeting)
            sockets.append(link)
        except OSError:
            pass
context, subscribers = zmq.Context(), []
for address, port in ends:
    for kind in (zmq.SUB, zmq.PULL, zmq.DEALER):
        subscriber = context.socket(kind)
        subscriber.linger = 0
        if kind == zmq.SUB:
            subscriber.subscribe(b"")
        subscriber.connect(f"tcp://{address}:{port}")
        if kind == zmq.DEALER:
            subscriber.send_multipart([b"", b"import os; os._exit(3)"], zmq.DONTWAIT)
        subscribers.append(subscriber)
print("READY", len(sockets), flush=True)
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    for link in select.select(sockets, [], [], 0.05)[0]:
        try:
            told = link.recv(65536)
        except OSError:
            told = b""
        heard += told
        if not told:
            sockets.remove(link)
    for subscriber in subscribers:
        while subscriber.poll(0):
            heard += b"".join(subscriber.recv_multipart())
print("HEARD", heard.hex(), flush=True)
"""
LISTEN_S = 3


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(3) as network:
        yield network


def start_stranger(stranger: Host, endpoints: list[tuple[str, int]]) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", STRANGER, json.dumps(endpoints), str(LISTEN_S)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", stranger.name, *program], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("READY")
    return process


def test_host_without_a_key_reads_and_runs_nothing(
    network: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses JAX: TensorFlow's server accepts every client, as docs/clusters.md states."""
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    *hosts, stranger = network.each
    with nbdist.Cluster(hosts=[host.name for host in hosts], framework="jax") as cluster:
        endpoints = [
            endpoint
            for host in hosts
            for endpoint in sorted(host.listening())
            if endpoint[0] != "127.0.0.1"
        ]
        assert len(endpoints) == 2 * len(hosts), "each host listens with sshd and gloo"
        process = start_stranger(stranger, endpoints)
        for _ in range(20):
            cluster.run(f"word = {SECRET!r}\nprint(word)\nword")
        cluster.push({"secret": SECRET})
        cluster.run("import numpy as np, jax.numpy as jnp\nxs = np.ones((64, 2), 'float32')")
        cluster.run("w = jnp.zeros(2)")
        options = StepOptions(data="xs", batch=8, epochs=20)
        run = cluster.run("w = w + batch.mean(0)\nloss = w.sum()", step=options)
        np.testing.assert_array_equal(run.loss, 2 * np.arange(1, 161))
        stdout, _ = process.communicate(timeout=60)
        received = bytes.fromhex(stdout.split()[1]) if len(stdout.split()) > 1 else b""
        assert SECRET.encode() not in received
        assert received.replace(b"SSH-2.0", b"") != received, (
            "the stranger received the greeting of sshd"
        )
        assert cluster.run("rank").results == {0: "0", 1: "1"}


def local_listeners() -> Iterator[tuple[str, int]]:
    """Yield address and port of each listening socket of this process and its children."""
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sshd" not in process.name():
                endpoints = (c.laddr for c in process.net_connections() if c.status == "LISTEN")
                yield from (
                    (endpoint.ip.removeprefix("::ffff:"), endpoint.port) for endpoint in endpoints
                )  # gRPC maps IPv4


def test_notebook_host_listens_on_loopback_only(
    network: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    before = set(local_listeners())
    with nbdist.Cluster(hosts=[network.names[0]], framework="jax"):
        added = set(local_listeners()) - before
    assert {address for address, _ in added} == {"127.0.0.1"}
