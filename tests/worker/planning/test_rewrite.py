"""Microbatches on eight devices: the numbers of one device, and sums that are added once a step."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests import eight_devices

pytestmark = pytest.mark.processes

PROGRAM = r"""
import json, re
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from nbdist.jaxpr.sharding_constraints import MeshLayout
from nbdist.worker.planning.rewrite import rewriting

P = jax.P
LAYERS, WIDTH, ROWS, LENGTH, WORDS = 3, 16, 64, 6, 32
rng = np.random.default_rng(0)
def normal(*shape):
    return rng.normal(size=shape) / shape[-1] ** 0.5
params = dict(table=normal(WORDS, WIDTH), up=normal(LAYERS, WIDTH, 4 * WIDTH),
              down=normal(LAYERS, 4 * WIDTH, WIDTH), scale=normal(LAYERS, WIDTH))
batch = (rng.integers(0, WORDS, (ROWS, LENGTH)), rng.integers(0, 2, (ROWS, LENGTH)))

def layer(x, own):
    scores = jax.nn.softmax(jnp.einsum("bsh,bth->bst", x, x))
    x = x + jnp.einsum("bst,bth->bsh", scores, x) * own["scale"]
    return x + jax.nn.gelu(x @ own["up"]) @ own["down"], None

def step(params, batch):
    words, mask = batch
    def loss_of(params):
        x = params["table"][words]
        x, _ = jax.lax.scan(layer, x, {n: params[n] for n in ("up", "down", "scale")})
        log = jax.nn.log_softmax(x @ params["table"].T)
        each = -jnp.take_along_axis(log, jnp.roll(words, 1, 1)[..., None], -1)[..., 0]
        return (each * mask).sum() / mask.sum(), each.mean(1)
    (loss, each), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    norm = jnp.sqrt(sum((g ** 2).sum() for g in jax.tree.leaves(grads)))
    return loss, each, jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads)

def on(sizes, specs, remat="", places=None, micro=4, given_batch=batch):
    names = ("data", "model")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    layout = MeshLayout(mesh, [s for _, s in sorted(specs.items())]) if len(sizes) > 1 else None
    with jax.set_mesh(mesh):
        axes = {n: P(*(each[0] if each else None for each in specs.get(n, ()))) for n in params}
        at = {n: jax.NamedSharding(mesh, spec) for n, spec in axes.items()}
        given = (jax.device_put(params, at),
                 jax.device_put(given_batch, jax.NamedSharding(mesh, P("data"))))
        run = rewriting(step, remat, micro, layout=layout, places=places or sizes[0])
        compiled = jax.jit(run, out_shardings=(None, None, at)).lower(*given).compile()
        made = compiled(*given)
        wanted = jax.jit(step)(params, given_batch)
        for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    return compiled.as_text()

def reduces(text):
    "The all-reduces: whether each is in a loop, and its largest array."
    for line in text.splitlines():
        match = re.search(r"= (.*?) (all-\w+|reduce-scatter)(-start)?\(", line)
        if match:
            sizes = [int(np.prod(json.loads(f"[{s}]") or [1]))
                     for s in re.findall(r"f64\[([\d,]*)\]", match[1])]
            yield match[2], "/while/" in line, max(sizes, default=0)
"""


def found_on_eight_devices(code: str) -> Any:
    return eight_devices.printed_by(PROGRAM + textwrap.dedent(code))


def test_gradients_are_added_once_after_the_last_microbatch() -> None:
    """The compiler adds the rows of a batch that does not divide."""
    once = found_on_eight_devices(
        """
        few = tuple(rows[:24] for rows in batch)
        on((8,), {}, micro=2, given_batch=few)
        print(json.dumps(list(reduces(on((8,), {})))))
        """
    )
    assert [one for one in once if one[1]] == [], "no collective in a loop"
    assert {kind for kind, _, _ in once} == {"all-reduce"}


@pytest.mark.full
def test_gradients_of_one_place_are_added_in_the_loop() -> None:
    each_time = found_on_eight_devices(
        """print(json.dumps(list(reduces(on((8,), {}, places=1)))))"""
    )
    assert any(is_within for _, is_within, _ in each_time)


@pytest.mark.full  # with remat
def test_recomputed_layers_keep_their_sums_apart() -> None:
    once = found_on_eight_devices(
        """print(json.dumps(list(reduces(on((8,), {}, remat="full")))))"""
    )
    assert [one for one in once if one[1]] == []


def test_only_activations_are_added_in_a_microbatch_of_a_sharded_model() -> None:
    once = found_on_eight_devices(
        """
        specs = dict(up=((), (), ("model",)), down=((), ("model",), ()), scale=((), ()),
                     table=((), ()))
        print(json.dumps(list(reduces(on((4, 2), specs)))))
        """
    )
    rows = 64 // 4 // 4 * 6 * 16  # of a microbatch on one device
    within = [(kind, size) for kind, is_within, size in once if is_within]
    assert within
    assert {kind for kind, _ in within} == {"all-reduce"}
    assert all(size <= rows for _, size in within), "no gradient of a parameter"
