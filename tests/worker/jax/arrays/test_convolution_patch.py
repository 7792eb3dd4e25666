"""Grouped convolutions over several devices, compared with one device."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import jax
import pytest

pytestmark = pytest.mark.processes

PROGRAM = textwrap.dedent("""
    import json, sys
    import jax, jax.numpy as jnp, numpy as np

    jax.config.update("jax_num_cpu_devices", 4)
    if sys.argv[1] == "patched":
        from nbdist.worker.jax.arrays import convolution_patch

        convolution_patch.apply()
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(8, 1, 6, 6, 4)).astype("f4")
    kernel = rng.normal(size=(3, 3, 4, 2)).astype("f4")
    depthwise = rng.normal(size=(3, 3, 1, 4)).astype("f4")

    def loss(kernel, x):
        layout = ("NHWC", "HWIO", "NHWC")
        groups = 4 // kernel.shape[2]
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups)
        return jnp.sin(y).sum()

    per_sample = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))
    of_batch = jax.jit(jax.grad(loss))
    meshes = {"rows": (4,), "grid": (2, 2)}
    devices = np.array(jax.devices())
    outcome = {}
    for name, shape in meshes.items():
        mesh = jax.sharding.Mesh(devices.reshape(shape), ("data", "model")[: len(shape)])
        split = jax.device_put(samples, jax.NamedSharding(mesh, jax.P("data")))
        difference = per_sample(kernel, samples) - np.asarray(per_sample(kernel, split))
        outcome[name] = float(np.abs(difference).max())
    whole = of_batch(depthwise, samples[:, 0])
    grid = jax.sharding.Mesh(devices.reshape(2, 2), ("data", "model"))
    for spec in (jax.P("data"), jax.P("model"), jax.P("data", None, None, "model")):
        split = jax.device_put(samples[:, 0], jax.NamedSharding(grid, spec))
        difference = whole - np.asarray(of_batch(depthwise, split))
        outcome[f"depthwise {spec}"] = float(np.abs(difference).max())
    mesh = jax.sharding.Mesh(devices, ("data",))
    split = jax.device_put(samples[:, 0], jax.NamedSharding(mesh, jax.P("data")))
    difference = whole - np.asarray(of_batch(depthwise, split))
    outcome["depthwise"] = float(np.abs(difference).max())
    text = of_batch.lower(depthwise, split).compile().as_text()
    outcome["whole batches"] = text.count("f32[8,6,6,4]{3,2,1,0} convolution(")
    print(json.dumps(outcome))
""")


def run(mode: str) -> dict[str, float]:
    """Return the largest differences between one and four devices."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def test_gradients_of_each_sample_are_those_of_one_device() -> None:
    outcome = run("patched")
    assert outcome.pop("whole batches") == 0, "depthwise convolutions of a split batch stay split"
    assert max(outcome.values()) < 1e-4


@pytest.mark.full
def test_patch_is_needed() -> None:
    outcome = run("upstream")
    assert outcome["rows"] > 0.1
    assert outcome[f"depthwise {jax.P('data')}"] > 0.1
