"""Double of Google Cloud's metadata server. No TPU VM is available.

It answers the requests of JAX's `GceTpuCluster` (jax/_src/clusters/cloud_tpu_cluster.py, JAX
0.10.2), with attributes in the form that TPU VMs have. On hosts in network namespaces it has the
real name and address, so nothing there knows of the double.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.utils.polling import repeat_until
from tests.netns import program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.netns import Host

_ROOT = "/computeMetadata/v1/instance/attributes/"
_ADDRESS, _PORT = "169.254.169.254", 80
_START_S = 30.0


class MetadataServer(ThreadingHTTPServer):
    """Metadata server with the attributes of one machine.

    Attributes:
        attributes: values by name.
        refusals: number of requests that still fail with status 503.
    """

    daemon_threads = True

    def __init__(self, end: tuple[str, int], attributes: Mapping[str, str]) -> None:
        super().__init__(end, _Handler)
        self.attributes = dict(attributes)
        self.refusals = 0

    @property
    def address(self) -> str:
        """Address and port, as in the variable `GCE_METADATA_IP`."""
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        value = self.server.attributes.get(self.path.removeprefix(_ROOT))
        status = 404 if value is None or not self.path.startswith(_ROOT) else 200
        if self.headers["Metadata-Flavor"] != "Google":
            status = 403
        if self.server.refusals:
            self.server.refusals, status = self.server.refusals - 1, 503
        content = (value or "").encode() if status == 200 else b"<!DOCTYPE html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextlib.contextmanager
def served(attributes: Mapping[str, str]) -> Iterator[MetadataServer]:
    """Serve the attributes of this machine, on the loopback interface."""
    with MetadataServer(("127.0.0.1", 0), attributes) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def served_on(host: Host, attributes: Mapping[str, str]) -> Iterator[None]:
    """Serve the attributes of a host in its namespaces, until it is powered off."""
    ip, nsenter = program("ip"), program("nsenter")
    assert ip is not None
    assert nsenter is not None
    lines = Path(f"/etc/netns/{host.name}/hosts")
    before = lines.read_text()
    lines.write_text(f"{before}{_ADDRESS} metadata.google.internal\n")
    own = (ip, "-n", host.name, "addr", "replace", f"{_ADDRESS}/32", "dev", "lo")
    subprocess.run(own, check=True)
    first = next(process for process in host.processes() if "sshd" in process.name())
    command = [sys.executable, "-m", "tests.tpu_double", json.dumps(attributes)]
    inside = [nsenter, "-t", str(first.pid), "-n", "-p", "-m", *command]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(inside, env=env) as process:
        try:
            assert repeat_until(lambda: (_ADDRESS, _PORT) in host.listening(), _START_S)
            yield
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            lines.write_text(before)


def attributes(
    hosts: Sequence[str],
    worker: int,
    accelerator: str = "v4-16",
    topology: str = "2x2x2",
    **environment: str,
) -> dict[str, str]:
    """Return the attributes of a TPU VM.

    Args:
        hosts: addresses of the hosts of its slice.
        worker: its number.
        accelerator: accelerator type of the slice.
        topology: shape of the slice in chips.
        **environment: further lines of `tpu-env`, such as those of MegaScale.
    """
    known = {"ACCELERATOR_TYPE": accelerator, "TOPOLOGY": topology, "WORKER_ID": str(worker)}
    lines = [f"{name}: '{value}'" for name, value in (known | environment).items()]
    return {
        "agent-worker-number": str(worker),
        "worker-network-endpoints": ",".join(f"unknown:{n}:{host}" for n, host in enumerate(hosts)),
        "accelerator-type": accelerator,
        "tpu-env": "\n".join([*lines, ""]),
    }


if __name__ == "__main__":
    MetadataServer((_ADDRESS, _PORT), json.loads(sys.argv[1])).serve_forever()
