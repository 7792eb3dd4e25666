"""Devices that JAX finds in this process, and data that moves between two platforms."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jax
import pytest

import nbdist
from nbdist.parallel.placement.devices import devices_apart
from nbdist.records import Bench, Crossing, Link, Product, Way
from nbdist.views.cluster.devices import DevicesPicture, intensity, roofline

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = """
import jax
from jax._src import xla_bridge
from jax._src.lib import xla_client
jax.config.update("jax_num_cpu_devices", 2)
xla_bridge.register_backend_factory(
    "zorn", lambda: xla_client.make_cpu_client(asynchronous=True, num_devices=2), priority=500,
    fail_quietly=False,
)
"""
"""Platform of a third party. Its devices are CPUs."""


def test_all_devices_are_listed() -> None:
    listed = nbdist.devices()
    assert [device.name for device in listed.devices] == [f"cpu:{number}" for number in range(8)]
    (first, *_) = listed.devices
    assert (first.platform, first.process) == ("cpu", 0)
    assert first.plugin.startswith("jaxlib ")
    assert first.memory_bytes is not None
    assert first.used_bytes is not None
    assert 0 < first.used_bytes < first.memory_bytes
    assert "nbdist: 8 devices on 1 host" in repr(listed)
    assert "<table" in listed._repr_mimebundle_()["text/html"]


def test_measured_values_are_shown() -> None:
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    bench = Bench(
        devices=8,
        products=tuple(Product(t, n, n * 1e9) for t in ("float32", "bfloat16") for n in (256, 512)),
        bytes_per_s=1e10,
        links={},
        transfers={"to device": link},
        dispatch_s=6e-6,
        crossing=Crossing(
            ways=(Way(64, 1e-5, 2e-5), Way(128, 8e-5, 4e-5)), size=96.0, home="cpu:0", there="gpu:0"
        ),
    )
    picture = DevicesPicture((), None, "", bench, of_cluster=False)
    text = repr(picture)
    assert ["to", "device", "10", "µs", "1.0", "GB/s"] in map(str.split, text.splitlines())
    assert "from 36.0 KiB on (products of 96 x 96) gpu:0 is faster, transfers included" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("64 x", "128 x"))]
    assert [row[-1] for row in rows] == ["cpu:0", "gpu:0"]
    assert 'src="data:image/png;base64,' in picture.html()
    assert roofline(bench).startswith(b"\x89PNG")


def test_intensity_counts_each_matrix_once() -> None:
    assert intensity(Product("float32", 300, 1.0)) == 2 * 300**3 / (3 * 300**2 * 4)


def in_process(code: str) -> Any:
    """Run a program on a machine with another platform, and parse the JSON in its last line."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{PLUGIN}\n{code}"], capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    return json.loads(ended.stdout.decode().splitlines()[-1])


@pytest.mark.processes
def test_an_unknown_platform_is_supported() -> None:
    """The unknown platform is JAX's default. Data moves there and back, and `where` reports it."""
    found = in_process("""
import json, nbdist, numpy as np
x = np.arange(8, dtype=np.float32)
there, here = nbdist.place(x, "zorn"), nbdist.place(x, "cpu")
back = nbdist.place(there, "cpu:1")
auto = nbdist.place(x, explain=True)
large = nbdist.place(np.ones((2048, 2048), np.float32), explain=True)
print(json.dumps({
    "names": [device.name for device in nbdist.devices().devices],
    "where": [nbdist.where(there) == "zorn", nbdist.where(there) == "cpu",
              nbdist.where(here) == "cpu", nbdist.where(back) == "cpu:1",
              nbdist.where(auto.tree) == "auto", nbdist.where(large.tree) == "auto"],
    "values": bool((np.asarray(there) == x).all() and (np.asarray(back) == x).all()),
    "reason": auto.reason, "on_cpu": nbdist.where(auto.tree) == "cpu",
}))
""")
    assert found["names"] == ["zorn:0", "zorn:1", "cpu:0", "cpu:1"]
    assert found["where"] == [True, False, True, True, True, True]
    assert found["values"]
    assert found["on_cpu"]  # for 32 bytes, the transfer takes longer than the computation
    assert "on one device, cpu:0: the transfer to zorn:0" in found["reason"]


@pytest.mark.processes
def test_another_process_lists_devices_if_jax_is_not_imported(tmp_path: Path) -> None:
    """If a kernel imported JAX, it would hold the GPU memory that workers need."""
    code = (
        "import sys\nfrom nbdist.parallel.placement.devices import devices_apart\n"
        "seen = devices_apart(bench=False)\nassert 'jax' not in sys.modules\nprint(seen)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, check=True, cwd=tmp_path
    )
    assert b"nbdist: 1 device on 1 host" in done.stdout


def test_this_process_lists_devices_if_jax_is_imported() -> None:
    assert len(devices_apart(bench=False).devices) == jax.device_count()


@pytest.mark.processes
def test_a_failed_listing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "zorn")
    monkeypatch.delitem(sys.modules, "jax")
    with pytest.raises(nbdist.UsageError, match=r"cannot list .* devices: .*zorn"):
        devices_apart(bench=False)
